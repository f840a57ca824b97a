#!/bin/sh
# Stop what start.sh started in a folder: ./stop.sh FOLDER. What is in the folder stays, and start.sh goes on with it.
set -eu

if [ $# -ne 1 ] || [ ! -d "$1" ]; then
    echo "usage: $0 FOLDER" >&2
    exit 2
fi

# stop PIDFILE: end it in peace, and by force after half a minute.
stop() {
    [ -e "$1" ] || return 0
    pid=$(cat "$1")
    kill "$pid" 2>/dev/null || { rm -f "$1"; return 0; }
    tries=150
    while kill -0 "$pid" 2>/dev/null; do
        tries=$((tries - 1))
        [ "$tries" -gt 0 ] || { kill -9 "$pid" 2>/dev/null || true; break; }
        sleep 0.2
    done
    rm -f "$1"
}

# The nodes first, so that each can say that it leaves.
for pids in "$1"/n*.pid; do
    [ ! -e "$pids" ] || kill "$(cat "$pids")" 2>/dev/null || true
done
for pids in "$1"/n*.pid; do
    stop "$pids"
done
stop "$1/etcd.pid"
