"""What a role can be asked to do: actor, reference, rollout."""
