#!/bin/sh
# The whole serving path on this host: ./start.sh FOLDER [MODEL]
#
# A store node, a Conductor, a worker that prefills, one that decodes, and a gateway that answers OpenAI's API.
# MODEL: smollm2 (135 M parameters, the default), tiny (random weights, for tests), or a folder with a model.
# FOLDER keeps everything: logs, the node's socket and token. Ports, all on 127.0.0.1: FIRST_PORT (8000) for the gateway,
# then one each for the Conductor, the two workers and the node's REST. Settings: serving.toml beside this file.
# Needs `cairn` (pip install 'cairn-kv[engine,gateway]') on the PATH, or CAIRN that names it, and curl.
set -eu

if [ $# -lt 1 ] || [ $# -gt 2 ]; then
    echo "usage: $0 FOLDER [MODEL]" >&2
    exit 2
fi
model=${2:-smollm2}
first=${FIRST_PORT:-8000}
cairn=${CAIRN:-cairn}
for program in "$cairn" curl; do
    command -v "$program" >/dev/null || { echo "$program is not on the PATH" >&2; exit 1; }
done
here=$(cd "$(dirname "$0")" && pwd)
umask 077
mkdir -p "$1"
folder=$(cd "$1" && pwd)
for pids in "$folder"/*.pid; do
    if [ -e "$pids" ] && kill -0 "$(cat "$pids")" 2>/dev/null; then
        echo "$pids says that it runs already: stop.sh $folder" >&2
        exit 1
    fi
done
gateway=127.0.0.1:$first conductor=127.0.0.1:$((first + 1))
prefill=127.0.0.1:$((first + 2)) decode=127.0.0.1:$((first + 3)) rest=127.0.0.1:$((first + 4))
store="unix://$folder/store.sock"

# start NAME SERVICE OPTION...: in the background, with its log and pid in the folder.
start() {
    name=$1 service=$2
    shift 2
    "$cairn" "$service" --config "$here/serving.toml" "$@" </dev/null >"$folder/$name.out" 2>>"$folder/$name.log" &
    echo $! >"$folder/$name.pid"
}

# wait_until NAME COMMAND...: try it for two minutes, as long as NAME's process lives; else stop everything.
wait_until() {
    name=$1
    shift
    give_up=$(($(date +%s) + 120))
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

# start_worker NAME ADDRESS: its role is its name.
start_worker() {
    start "$1" worker "--worker.name=$1" "--worker.role=$1" "--worker.listen=$2" "--worker.model=$model" \
        "--worker.node=$store" "--worker.conductor=http://$conductor"
}

start store node --node.name=store "--node.run_dir=$folder" --node.tcp_listen= "--rest.listen=$rest"
start conductor conductor "--conductor.listen=$conductor"
start gateway gateway "--gateway.listen=$gateway" "--gateway.conductor=http://$conductor"
wait_until store env "CAIRN_ADDRESS=$store" "$cairn" stat
start_worker prefill "$prefill"
start_worker decode "$decode"
wait_until prefill curl -sf "http://$prefill/health"
wait_until decode curl -sf "http://$decode/health"

# The Conductor counts both, and the gateway sees them.
ready() {
    curl -sf "http://$gateway/health" | grep -q '"instances": *2'
}
wait_until gateway ready
served=$(curl -sf "http://$gateway/v1/models" | sed 's/.*"id": *"\([^"]*\)".*/\1/')
cat <<END
It serves $served. Ask it:
  curl http://$gateway/v1/completions -H 'content-type: application/json' -d '{"model": "$served", "prompt": "Once upon a time", "max_tokens": 16}'
Watch it:      curl http://$conductor/v1/instances
Stop it all:   $here/stop.sh $folder
END
