#!/bin/sh
# Stop what start.sh started in a folder: ./stop.sh FOLDER. Logs stay; what the store had in memory is gone.
set -eu

if [ $# -ne 1 ] || [ ! -d "$1" ]; then
    echo "usage: $0 FOLDER" >&2
    exit 2
fi

# stop NAME: end it in peace, and by force after half a minute.
stop() {
    pids="$1.pid"
    [ -e "$pids" ] || return 0
    pid=$(cat "$pids")
    kill "$pid" 2>/dev/null || { rm -f "$pids"; return 0; }
    tries=150
    while kill -0 "$pid" 2>/dev/null; do
        tries=$((tries - 1))
        [ "$tries" -gt 0 ] || { kill -9 "$pid" 2>/dev/null || true; break; }
        sleep 0.2
    done
    rm -f "$pids"
}

# From the clients' end to the store's, so that each may finish what it has begun.
for name in gateway prefill decode conductor store; do
    stop "$1/$name"
done
