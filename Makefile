# SPDX-License-Identifier: Apache-2.0
# Every target first installs what it needs, once.
#
#   make train [ARGS="--env BreakoutNoFrameskip-v4 --num_actors 8"]
#   make test  [ARGS="-k vtrace"]
#
# PYTHON=/path/to/python3.12 chooses the interpreter of .venv.

PY := .venv/bin/python
CXX_FILES := $(wildcard csrc/*.h csrc/*.cc csrc/tests/*.h csrc/tests/*.cc benchmarks/*.cc)

TRAIN := --xpid 'train-{env}'
QUICKSTART := --xpid quickstart --env MinAtar/Breakout-v1 --total_steps 1500000 \
  --batch_size 16 --envs_per_actor 16 --learning_rate 0.002 --epsilon 0.001 \
  --entropy_cost 0.02

.PHONY: train quickstart watch test coverage test-classic sanitize fuzz nemesis \
  nemesis-short bench results-table wheel fresh images lint setup clean

# PolyBeast on Atari Pong, unless ARGS names another environment. A second call continues
# from the checkpoint.
train: setup
	@exec $(PY) tools/launch.py polybeast $(TRAIN) $(ARGS)

# MonoBeast: learns within minutes on a laptop's CPU.
quickstart: setup
	@exec $(PY) tools/launch.py monobeast $(QUICKSTART) $(ARGS)

# All runs in a browser: return, speed, bottleneck, lag, losses, videos. The filter in the
# address hides the link `latest`, which shows one of the runs a second time.
WATCH_PORT := 6006
watch: setup
	@echo 'Open http://localhost:$(WATCH_PORT)/#custom_scalars&regexInput=^(?!latest)'
	@exec $(PY) -m tensorboard.main --logdir ~/logs/torchbeast --port $(WATCH_PORT) $(ARGS)

test: setup
	$(PY) -m pytest $(ARGS)

# All tests, and then the lines of core/ and the trainers that no test runs, in any process
# that ends by itself: a process that is killed cannot tell which lines it ran. The file's
# path is absolute because processes write it from other working directories.
coverage: export COVERAGE_FILE := $(CURDIR)/build/coverage/data
coverage: setup
	$(PY) -m coverage erase
	$(PY) -m coverage run -m pytest $(ARGS); status=$$?; \
	  $(PY) -m coverage combine --quiet && $(PY) -m coverage report && exit $$status

# Classic gym and atari-py, in an environment of their own.
test-classic:
	@tools/setup.sh classic
	.venv-classic/bin/python -m pytest tests/classic $(ARGS)

# The C++ core's own tests, under ThreadSanitizer, then AddressSanitizer and UBSan.
sanitize: setup
	$(MAKE) -j 2 -C csrc/tests SANITIZE=thread
	$(MAKE) -j 2 -C csrc/tests SANITIZE=address

# Fuzzes everything that reads data from strangers: the C++ under AddressSanitizer and
# UBSan, then the Python. Each of six targets runs for FUZZ_S seconds.
FUZZ_S := 60
fuzz: setup
	$(MAKE) -C csrc/tests fuzz FUZZ_S=$(FUZZ_S)
	for target in server welcome dial checkpoint; do \
	  $(PY) -m tools.fuzz $$target --seconds $(FUZZ_S) || exit 1; \
	done

# Breaks runs on purpose and measures the damage, in three to four hours. CI runs the short
# form, nemesis-short, in minutes.
nemesis: setup
	$(PY) -m tools.nemesis --all --out results/reliability $(ARGS)

nemesis-short: setup
	$(PY) -m tools.nemesis --short $(ARGS)

# Measures the speed of this commit, and says what became slower than noise; ten minutes.
bench: setup
	$(PY) -m benchmarks.bench

# Our learning results and published ones, as a Markdown table.
results-table: setup
	@$(PY) -m tools.results_table

# Builds a wheel with the gRPC libraries, in dist/, for machines without a compiler.
wheel: setup
	tools/wheel.sh

# Runs the README's first commands in an empty Debian, in some minutes. Needs root.
fresh: setup
	$(PY) -m tools.fresh.readme

# Runs the steps of tools/docker's Dockerfiles, and their commands, in an empty Debian.
images: setup
	$(PY) -m tools.fresh.dockerfiles

lint: setup
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	$(PY) -m mypy
	.venv/bin/clang-format --style=file:csrc/.clang-format --dry-run --Werror $(CXX_FILES)

setup:
	@tools/setup.sh

# Deletes everything that make created. Runs and their checkpoints stay.
clean:
	rm -rf .venv .venv-classic build dist *.egg-info csrc/tests/build libtorchbeast/*.so
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +
