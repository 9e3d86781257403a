# What NCCL and gloo may have to be told about a cluster's network; to be sourced by the launch scripts.
#
# Both find their way by themselves on most clusters: every line below is off. Set one only where its sentence applies, here or in
# your environment, alike on all nodes. `hybridflow check-env --nodes N` measures what comes out.

# Several networks, and ranks of different nodes don't find each other, or use the slow one: the interface to use.
# export NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0
# (hybridflow sets GLOO_SOCKET_IFNAME itself where the machine's own name points to 127.0.x.x, as Debian has it.)

# Bandwidth between nodes is that of Ethernet although there is InfiniBand or RoCE: which adapters to use.
# export NCCL_IB_HCA=mlx5_0,mlx5_1
# RoCE only: the index of the RoCE v2 address (show_gids lists it), and no InfiniBand at all where it is broken:
# export NCCL_IB_GID_INDEX=3
# export NCCL_IB_DISABLE=1

# NCCL does not start or is slow and nobody knows why: it says what it chose in the ranks' logs.
# export NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,NET

# "unhandled system error" with NVLink multicast in containers without the rights for it.
# export NCCL_NVLS_ENABLE=0
