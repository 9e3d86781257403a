"""Who runs what where: ranks, role handles, transfer protocols, launchers. Knows nothing of reinforcement learning."""
