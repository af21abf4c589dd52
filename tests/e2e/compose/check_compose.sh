#!/usr/bin/env bash
# Runs the compose file for real and counts what users would notice: builds, starts, asks about pictures, scales up and
# down, kills, restarts and stops parts while questions are being asked, and removes everything again.
#
#   tests/e2e/compose/check_compose.sh        about five minutes on two cores, a build the first time not counted
#
# Its own project name and port keep it apart from a system that is already running. Without Docker it does nothing.
set -euo pipefail
cd "$(dirname "$0")/../../.."

if ! docker info >/dev/null 2>&1 || ! docker compose version >/dev/null 2>&1; then
  echo "skipped: no Docker engine with 'docker compose' answers here"
  exit 0
fi

export COMPOSE_PROJECT_NAME=diptych-check PORT=${PORT:-8765} ADDRESS=127.0.0.1 MODEL=demo
readonly URL=http://$ADDRESS:$PORT SAMPLES=models/demo/samples ASKERS=3
work=$(mktemp -d)
failures=0
summary=()

compose() { docker compose --progress quiet "$@"; }
say() { printf '\n== %s\n' "$*"; }
clean_up() { rm -f "$work/asking"; wait; compose down --volumes --timeout 5 >/dev/null 2>&1 || true; rm -rf "$work"; }
trap clean_up EXIT

# check NAME COMMAND...: one line of the summary. The commands are functions of this file or plain tests.
check() {
  local name=$1
  shift
  if "$@"; then summary+=("ok      $name"); else summary+=("FAILED  $name") failures=$((failures + 1)); fi
}

# body NUMBER: a request. Two in three bring a picture that no cache knows (random bytes after the picture's own end),
# one in three streams.
body() {
  local pictures=("$SAMPLES"/*.png) stream=false image=""
  [ $(($1 % 3)) = 0 ] && stream=true
  [ $(($1 % 3)) = 1 ] || image=$({ cat "${pictures[$(($1 % ${#pictures[@]}))]}"; head -c 16 /dev/urandom; } | base64 -w0)
  image=${image:+'{"type": "image_url", "image_url": {"url": "data:image/png;base64,'$image'"}},'}
  printf '{"model": "demo", "max_tokens": 24, "temperature": 0, "stream": %s, "messages": [{"role": "user",
    "content": [%s {"type": "text", "text": "What is in the picture?"}]}]}' "$stream" "$image"
}

# ask NUMBER: prints the HTTP status of an answer that came whole, "cut" for one that broke off, 000 for no answer.
ask() {
  local answer=$work/answer-$1 status
  status=$(body "$1" | curl --silent --max-time 90 --header 'Content-Type: application/json' --data-binary @- \
    --output "$answer" --write-out '%{http_code}' "$URL/v1/chat/completions") || status=${status:-000}
  if [ "$status" = 200 ] && ! grep -qE '^data: \[DONE\]|"chat.completion",.*"finish_reason":"(stop|length)"' "$answer"; then status=cut; fi
  if grep -q '"error"' "$answer" 2>/dev/null; then [ "$status" = 200 ] && status=cut; grep -h '"error"' "$answer" >>"$work/errors"; fi
  rm -f "$answer"
  echo "$status"
}

asker() {
  local number=$1
  while [ -e "$work/asking" ]; do
    ask "$number" >>"$work/statuses"
    number=$((number + ASKERS + 1)) # so that every asker asks every kind of question
    sleep 0.1                       # a gateway that is away must not fail thousands of times
  done
}

# while_asking LIMIT NAME COMMAND...: runs the command while questions are asked, and five seconds longer.
# LIMIT: how many may fail, or "-" where some must (an answer under way dies with its process).
while_asking() {
  local limit=$1 name=$2 since=$SECONDS asker_pids=() number
  shift 2
  say "$name"
  : >"$work/statuses"
  : >"$work/errors"
  touch "$work/asking"
  for number in $(seq $ASKERS); do asker "$number" & asker_pids+=($!); done
  sleep 2
  check "$name: done" "$@"
  sleep 5
  rm -f "$work/asking"
  wait "${asker_pids[@]}"
  local asked failed
  asked=$(wc -l <"$work/statuses")
  failed=$(grep -vc '^200$' "$work/statuses" || true)
  local line="$asked asked, $failed failed in $((SECONDS - since)) s"
  if [ "$failed" != 0 ]; then line+=" ($(grep -v '^200$' "$work/statuses" | sort | uniq -c | xargs))"; fi
  echo "$line"
  sort "$work/errors" | cut -c -300 | uniq -c
  check "$name: $line" test "$limit" = - -o "$failed" -le "${limit/-/0}"
}

containers() { compose ps --quiet "$1"; }
num_ready() { curl --silent "$URL/metrics" | grep -c "^diptych:gateway_replica_ready{.*service=\"$1\".*} 1.0" || true; }
are_ready() { # ENCODERS ENGINES: whether the gateway comes to know exactly so many within 30 s
  for _ in $(seq 30); do
    if [ "$(num_ready vision_encoder) $(num_ready text_engine)" = "$1 $2" ]; then return; fi
    sleep 1
  done
  echo "the gateway knows $(num_ready vision_encoder) encoders and $(num_ready text_engine) engines"
  return 1
}
scale() { compose up --detach --wait --no-build --scale "vision_encoder=$1" --scale "text_engine=$2" && are_ready "$1" "$2"; }
restart_one() { # SERVICE ENCODERS ENGINES
  docker restart "$(containers "$1" | head -1)" >/dev/null
  sleep 3
  are_ready "$2" "$3"
}
kill_one_engine() {
  local engine
  engine=$(containers text_engine | head -1)
  docker exec "$engine" sh -c 'kill -9 -1' || true # every process but init, which then ends: the restart policy's turn
  sleep 3
  are_ready 3 2 && [ "$(docker inspect --format '{{.RestartCount}}' "$engine")" = 1 ]
}
stop_redis_for_a_while() { compose stop redis && sleep 15 && compose start redis; }
is_confined() { # SERVICE: no root, no capabilities, no writable root file system
  docker exec "$(containers "$1" | head -1)" sh -c \
    '[ "$(id -u)" != 0 ] && grep -q "^CapBnd:.0*$" /proc/1/status && ! touch /x 2>/dev/null && touch /tmp/x'
}
loads_kernels() { compose logs text_engine | grep -q 'native CPU kernels loaded'; }
has_no_torch() { ! docker exec "$(containers gateway)" find /venv /code /usr -name torch | grep -q .; }

say "build and start"
compose build
since=$SECONDS
check "starts" compose up --detach --wait --no-build
summary+=("        ready $((SECONDS - since)) s after 'up'")
for image in gateway vision-encoder text-engine; do
  summary+=("        diptych-$image $(docker images --format '{{.Size}}' "diptych-$image:latest")")
done
for service in gateway vision_encoder text_engine; do check "$service is confined" is_confined "$service"; done
check "the gateway has no torch" has_no_torch
check "the engine loads its compiled kernels" loads_kernels
for number in 1 2 3; do check "question $number of 3 is answered" test "$(ask "$number")" = 200; done

while_asking 0 "scale up to 3 encoders and 2 engines" scale 3 2
while_asking - "kill -9 one engine of two" kill_one_engine
while_asking 0 "restart one encoder of three" restart_one vision_encoder 3 2
while_asking 0 "restart one engine of two" restart_one text_engine 3 2
while_asking 0 "restart redis" restart_one redis 3 2
while_asking 0 "stop redis for 15 s" stop_redis_for_a_while
while_asking 0 "scale down to 1 and 1" scale 1 1
while_asking - "restart the only gateway" restart_one gateway 1 1

say "summary"
printf '%s\n' "${summary[@]}"
[ "$failures" = 0 ] || { echo "$failures checks failed"; exit 1; }
