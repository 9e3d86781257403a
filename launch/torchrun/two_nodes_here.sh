#!/usr/bin/env bash
# Runs a command on two "nodes" on this machine: network namespaces with host names of their own, joined by a bridge. For drills.
#
#   bash launch/torchrun/two_nodes_here.sh COMMAND...     with NODE_RANK, MASTER_ADDR, MASTER_PORT, HYBRIDFLOW_JOB set
#
# Needs root, iproute2 and util-linux. Ends with the first bad status. NODES, MINUTES: how many (2), and until when (10).
set -uo pipefail
nodes=${NODES:-2} tag=hf$$ folder=$(mktemp -d) pids=()
clean() {
  trap - EXIT INT TERM
  for index in $(seq 0 $((nodes - 1))); do
    # whatever is still in the namespace was started by this script
    for pid in $(ip netns pids "$tag-$index" 2> /dev/null); do kill -KILL "$pid" 2> /dev/null; done
    ip netns del "$tag-$index" 2> /dev/null
  done
  ip link del "b$tag" 2> /dev/null
  rm -rf "$folder"
}
trap clean EXIT
trap 'exit 130' INT TERM
# look-ups that ask a name server which a namespace cannot reach would take seconds each
echo "127.0.0.1 localhost" > "$folder/hosts"
printf 'passwd: files\ngroup: files\nhosts: files\n' > "$folder/nsswitch.conf"
ip link add "b$tag" type bridge && ip link set "b$tag" up || exit 1
for index in $(seq 0 $((nodes - 1))); do
  ip netns add "$tag-$index"
  ip link add "v$tag$index" type veth peer name eth0 netns "$tag-$index"
  ip link set "v$tag$index" master "b$tag" up
  ip -n "$tag-$index" addr add "10.78.0.$((index + 1))/24" dev eth0
  ip -n "$tag-$index" link set eth0 up
  ip -n "$tag-$index" link set lo up
  echo "10.78.0.$((index + 1)) node$index" >> "$folder/hosts"
done
for index in $(seq 0 $((nodes - 1))); do
  NODE_RANK=$index MASTER_ADDR=node0 MASTER_PORT=29500 HYBRIDFLOW_JOB=${HYBRIDFLOW_JOB:-here-$$} \
    timeout -k 10 "${MINUTES:-10}m" nsenter --net="/run/netns/$tag-$index" unshare --uts --mount -- sh -ec '
      hostname "$1"; mount --bind "$2/hosts" /etc/hosts; mount --bind "$2/nsswitch.conf" /etc/nsswitch.conf
      shift 2; exec "$@"' sh "node$index" "$folder" "$@" &
  pids+=($!)
done
status=0
for pid in "${pids[@]}"; do wait "$pid" || { one=$?; [ "$status" -ne 0 ] || status=$one; }; done
exit "$status"
