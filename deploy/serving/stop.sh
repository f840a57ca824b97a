#!/bin/sh
# Stop what start.sh started in a folder: ./stop.sh FOLDER. Logs stay; what the store had in memory is gone.
set -eu

if [ $# -ne 1 ] || [ ! -d "$1" ]; then
    echo "usage: $0 FOLDER" >&2
    exit 2
fi

# stop NAME...: end them in peace, all at a time, and by force after half a minute.
stop() {
    for name in "$@"; do
        [ ! -e "$folder/$name.pid" ] || kill "$(cat "$folder/$name.pid")" 2>/dev/null || true
    done
    tries=150
    for name in "$@"; do
        [ -e "$folder/$name.pid" ] || continue
        pid=$(cat "$folder/$name.pid")
        while kill -0 "$pid" 2>/dev/null; do
            tries=$((tries - 1))
            [ "$tries" -gt 0 ] || { kill -9 "$pid" 2>/dev/null || true; break; }
            sleep 0.2
        done
        rm -f "$folder/$name.pid"
    done
}

# From the clients' end to the store's, so that each may finish what it has begun.
folder=$1
stop gateway
stop prefill decode
stop conductor store
