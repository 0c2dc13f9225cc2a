#!/usr/bin/env bash
# Drives two model workers over pipes, using only the shell, as a controller in any language would.
#
#     bash examples/controller.sh
#
# Prints every frame. Exits with 1 if a worker sends an unexpected reply, or does not exit with 0.
set -euo pipefail

PYTHON=${PYTHON:-python}
WORLD_SIZE=2

start() { # rank
    coproc WORKER { exec "$PYTHON" -m drivetrain.workers.process --rank "$1" --world-size "$WORLD_SIZE"; }
    # Bash knows the descriptors of one coprocess at a time.
    eval "exec {TO_$1}>&\"\${WORKER[1]}\" {FROM_$1}<&\"\${WORKER[0]}\""
    eval "PID_$1=$WORKER_PID"
}

send() { # rank frame
    local to="TO_$1"
    echo "-> $1 $2"
    echo "$2" >&"${!to}"
}

expect() { # rank pattern
    local from="FROM_$1" reply
    read -r -t 60 reply <&"${!from}"
    echo "<- $1 $reply"
    # shellcheck disable=SC2053  # a pattern
    [[ $reply == $2 ]] || { echo "expected $2" >&2; exit 1; }
}

all() { # frame, pattern of the replies
    # Send the request to every rank before waiting for a reply: a collective needs all ranks.
    send 0 "$1" && send 1 "$1"
    expect 0 "$2" && expect 1 "$2"
}

start 0 2> /dev/null
start 1 2> /dev/null

all '{"op":"ping"}' '{"op":"pong","rank":?,"world_size":2,"cuda_device":?}'
all "{\"op\":\"init\",\"comm_id\":\"$("$PYTHON" -m drivetrain.cli worker comm-id)\"}" '{"op":"init_ok"}'
all '{"op":"nccl_sanity_check"}' '{"op":"nccl_sanity_result","observed_sum":2}'
all '{"op":"shutdown"}' '{"op":"bye"}'

wait "$PID_0" "$PID_1"
