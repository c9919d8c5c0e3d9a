#!/usr/bin/env bash
# The first process in a node's namespaces: makes them look like a machine of its own and runs slurmd there.
# When it ends, the kernel ends all that runs on the node.
#
#   node.sh NAME ADDRESS/BITS BASE
set -euo pipefail
name=$1 address=$2 base=$3

hostname "$name"
mount -t tmpfs -o mode=1777 tmp /tmp
mount -t tmpfs -o mode=1777 shm /dev/shm

# Libraries look for network interfaces in /sys, which shows those of the namespace it was mounted in.
mount -t sysfs sysfs /sys

until [[ -e /sys/class/net/hsn0 ]]; do sleep 0.02; done
ip link set lo up
ip addr add "$address" dev hsn0
ip link set hsn0 up

slurmd -D -N "$name" -f "$base/etc/slurm.conf" &
wait
