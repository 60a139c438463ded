# Commands to begin with: `make demo`, `make demo-text` and `make test`. All set themselves up.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
CODE = samplers rewards flowrl scripts tests typings

# Without compiled modules every process would compile all libraries anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup demo demo-text quick changed stranger renew test shapes test-open-clip lint check format docs

setup:
	@$(PYTHON) scripts/make_venv.py --venv $(VENV)

demo: setup
	@$(BIN)/python scripts/demo.py

# A published language model learns to answer; takes a package of 93 MB that ships its weights.
demo-text: setup
	@$(BIN)/python scripts/demo_text.py

CALCULUS = tests/credit tests/losses tests/likelihoods tests/samplers tests/budget tests/recipes/test_recipes.py
# A file's tests stay with one worker, in the order of the files: what a file prepares for its tests,
# such as runs of two processes, is prepared once.
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest --dist loadfile --no-loadscope-reorder

test: setup
	@$(PYTEST) -n auto --durations=30

# Shapes in signatures checked at run time (jaxtyping, beartype) where the calculus is tested;
# everywhere, this takes as long as everything else together.
shapes: setup
	@$(PYTEST) -n auto --jaxtyping-packages=samplers,rewards,flowrl,beartype.beartype $(CALCULUS)

# The calculus and the settings, while you write.
quick: setup
	@$(PYTEST) -n 2 -m 'not slow and not gpu and not long' $(CALCULUS) tests/settings

# The tests that import what differs from main.
changed: setup
	@OMP_NUM_THREADS=1 $(BIN)/python scripts/changed.py

# The wheel on a machine without our versions: newest packages, then the oldest; takes an hour.
stranger: setup
	@$(BIN)/python scripts/stranger.py
	@$(BIN)/python scripts/stranger.py --oldest

# Pins of the newest versions (constraints.txt), if all commands of the pages run with them.
renew: setup
	@$(BIN)/python scripts/stranger.py --renew

# Tests with open_clip and the torchvision that it needs, in an environment of their own.
test-open-clip: setup
	@$(BIN)/python scripts/make_open_clip_venv.py --base $(VENV) --venv $(VENV)-open-clip
	@OMP_NUM_THREADS=1 $(VENV)-open-clip/bin/python -m pytest tests/rewards/test_reward_models_open_clip.py tests/language/test_vision_qwen.py

# The one list of static checks: for hands, for pre-commit and for CI.
lint: setup
	@$(BIN)/ruff format --check $(CODE)
	@$(BIN)/ruff check $(CODE)
	@$(BIN)/pyright --pythonpath $(BIN)/python
	@$(BIN)/lint-imports

# Side by side, each with its output as a whole: the type checker takes one processor for minutes.
# Both set themselves up, once.
check:
	@$(MAKE) --no-print-directory --jobs 2 --output-sync=target lint test

format: setup
	@$(BIN)/ruff format $(CODE)
	@$(BIN)/ruff check --fix $(CODE)

# The documentation as a site: open site/index.html (its search needs `python -m http.server -d site`).
# Warnings are errors.
docs: setup
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict
