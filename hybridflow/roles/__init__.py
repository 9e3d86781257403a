"""What a role can be asked to do: actor, critic, reference, rollout."""
