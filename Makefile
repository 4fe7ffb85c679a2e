# SPDX-License-Identifier: Apache-2.0
# Every target sets up first what it needs; a second call finds that done.
#
#   make train [ARGS="--env BreakoutNoFrameskip-v4 --num_actors 8"]
#   make test  [ARGS="-k vtrace"]
#
# PYTHON=/path/to/python3.12 chooses the interpreter that .venv is made of.

PY := .venv/bin/python
CXX_FILES := $(wildcard csrc/*.h csrc/*.cc csrc/tests/*.h csrc/tests/*.cc benchmarks/*.cc)

TRAIN := --xpid 'train-{env}'
QUICKSTART := --xpid quickstart --env MinAtar/Breakout-v1 --total_steps 1500000 \
  --batch_size 16 --envs_per_actor 16 --learning_rate 0.002 --epsilon 0.001 \
  --entropy_cost 0.02

.PHONY: train quickstart watch test coverage test-classic sanitize fuzz nemesis \
  nemesis-short bench results-table wheel fresh images lint setup clean

# PolyBeast on Atari Pong, unless ARGS names another environment. Goes on from its
# checkpoint.
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

# The same, and which lines of core/ and the trainers no test runs, in any process that
# ends by itself: a process that is killed cannot tell which lines it ran. The file's
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

# Everything that reads what strangers send: the C++ under AddressSanitizer and UBSan,
# then the Python; each of six targets for so many seconds.
FUZZ_S := 60
fuzz: setup
	$(MAKE) -C csrc/tests fuzz FUZZ_S=$(FUZZ_S)
	for target in server welcome dial checkpoint; do \
	  $(PY) -m tools.fuzz $$target --seconds $(FUZZ_S) || exit 1; \
	done

# Breaks runs on purpose and measures the damage, for three to four hours, of which the
# soak takes one; CI's short form: make nemesis-short.
nemesis: setup
	$(PY) -m tools.nemesis --all --out results/reliability $(ARGS)

nemesis-short: setup
	$(PY) -m tools.nemesis --short $(ARGS)

# How fast this commit is on this machine, and whether something became slower than noise;
# ten minutes.
bench: setup
	$(PY) -m benchmarks.bench

# Our learning results beside those that others have published, in Markdown.
results-table: setup
	@$(PY) -m tools.results_table

# A wheel with the gRPC libraries inside, in dist/: for machines without a compiler.
wheel: setup
	tools/wheel.sh

# The README's first commands, word for word, in an empty Debian; some minutes. As root.
fresh: setup
	$(PY) -m tools.fresh.readme

# The steps of tools/docker's Dockerfiles, and their commands, likewise.
images: setup
	$(PY) -m tools.fresh.dockerfiles

lint: setup
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	$(PY) -m mypy
	.venv/bin/clang-format --style=file:csrc/.clang-format --dry-run --Werror $(CXX_FILES)

setup:
	@tools/setup.sh

# What make made. Runs and their checkpoints stay where they are.
clean:
	rm -rf .venv .venv-classic build dist *.egg-info csrc/tests/build libtorchbeast/*.so
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +
