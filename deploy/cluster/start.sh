#!/bin/sh
# Five nodes and etcd on this host, without containers: ./start.sh FOLDER [FIRST_PORT]
#
# FOLDER keeps everything: a folder for each node (socket, log, token), etcd's data, the secret that the nodes share.
# Ports, all on 127.0.0.1: FIRST_PORT (7500) and the next for etcd, then for each node one for TCP and one for REST.
# Needs `cairn` (pip install 'cairn-kv[cluster]') and `etcd` (apt-get install etcd-server) on the PATH, or CAIRN and
# ETCD that name them. NODES (5), CAPACITY (256MiB of DRAM each) and DISK (of an NVMe tier each; none without) may be set.
set -eu

if [ $# -lt 1 ] || [ $# -gt 2 ]; then
    echo "usage: $0 FOLDER [FIRST_PORT]" >&2
    exit 2
fi
first=${2:-7500}
nodes=${NODES:-5}
cairn=${CAIRN:-cairn}
etcd=${ETCD:-etcd}
for program in "$cairn" "$etcd"; do
    command -v "$program" >/dev/null || { echo "$program is not on the PATH" >&2; exit 1; }
done
here=$(cd "$(dirname "$0")" && pwd)
umask 077
mkdir -p "$1"
folder=$(cd "$1" && pwd)
for pids in "$folder"/*.pid; do
    if [ -e "$pids" ] && kill -0 "$(cat "$pids")" 2>/dev/null; then
        echo "$pids says that a cluster runs already: stop.sh $folder" >&2
        exit 1
    fi
done
[ -s "$folder/secret" ] || od -An -N24 -tx1 /dev/urandom | tr -d ' \n' >"$folder/secret"
CAIRN_CLUSTER__TOKEN=$(cat "$folder/secret")
export CAIRN_CLUSTER__TOKEN

# wait_until NAME COMMAND...: try it for half a minute, as long as NAME's process lives; else stop everything.
wait_until() {
    name=$1
    shift
    give_up=$(($(date +%s) + 30))
    until "$@" >/dev/null 2>&1; do
        if ! kill -0 "$(cat "$folder/$name.pid")" 2>/dev/null || [ "$(date +%s)" -gt "$give_up" ]; then
            echo "$name does not serve; the end of $folder/$name.log:" >&2
            tail -n 20 "$folder/$name.log" >&2
            "$here/stop.sh" "$folder"
            exit 1
        fi
        sleep 0.2
    done
}

client="http://127.0.0.1:$first" peer="http://127.0.0.1:$((first + 1))"
"$etcd" --name one --data-dir "$folder/etcd" --log-level warn --logger zap \
    --listen-client-urls "$client" --advertise-client-urls "$client" \
    --listen-peer-urls "$peer" --initial-advertise-peer-urls "$peer" --initial-cluster "one=$peer" \
    </dev/null >>"$folder/etcd.log" 2>&1 &
echo $! >"$folder/etcd.pid"

number=1
while [ "$number" -le "$nodes" ]; do
    name=n$number port=$((first + 2 * number))
    mkdir -p "$folder/$name"
    set -- "--node.name=$name" "--node.run_dir=$folder/$name" "--node.tcp_listen=127.0.0.1:$port" \
        "--rest.listen=127.0.0.1:$((port + 1))" "--tiers.dram.capacity=${CAPACITY:-256MiB}" --tiers.dram.slab=16MiB \
        "--cluster.coordinator=etcd://127.0.0.1:$first/cairn" "--cluster.labels=host=$name"
    [ -z "${DISK:-}" ] || set -- "$@" "--tiers.nvme.path=$folder/$name/nvme" "--tiers.nvme.capacity=$DISK" \
        --tiers.nvme.slab=16MiB
    "$cairn" node "$@" </dev/null >"$folder/$name.out" 2>>"$folder/$name.log" &
    echo $! >"$folder/$name.pid"
    number=$((number + 1))
done

number=1
while [ "$number" -le "$nodes" ]; do
    name=n$number
    wait_until "$name" env "CAIRN_ADDRESS=unix://$folder/$name/$name.sock" "$cairn" stat
    number=$((number + 1))
done
# Each node has joined once the first lists it.
listed() {
    [ "$("$cairn" nodes --json --address "unix://$folder/n1/n1.sock" | tr , '\n' | grep -c '"epoch"')" -eq "$nodes" ]
}
wait_until n1 listed
"$cairn" nodes --address "unix://$folder/n1/n1.sock"
echo
echo "Ask any of them: cairn nodes --address unix://$folder/n1/n1.sock"
echo "Stop them all:   $here/stop.sh $folder"
