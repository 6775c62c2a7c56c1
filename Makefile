# make demo  - suite A at a size for a CPU: what each technique saves, with plots   (make demo TEXT=my_text.txt)
# make test  - everything that can be proven on this machine
# make train - the trainer alone, build/train
# make bench - a step's time and memory on a GPU, PyTorch's beside ours, into README.md   (make bench BENCH='a128 gpt2_16')
# make profile - what each operation of a step takes   (make profile ARGS="--flash-attn --chunked")
CC     ?= cc
CFLAGS ?= -O3 -march=native
CFLAGS += -std=gnu99 -Wall -Wextra -fopenmp
B      := build
export OMP_WAIT_POLICY ?= passive# threads that spin lose much on a machine with other work

# OpenBLAS where it is: the OpenMP build, since the threads of the other one and OpenMP's own wait for each other.
BLAS_DIR := $(firstword $(wildcard /usr/lib/$(shell $(CC) -print-multiarch 2>/dev/null)/openblas-openmp))
ifneq ($(BLAS_DIR),)
BLAS := -DMTT_CBLAS -L$(BLAS_DIR) -lopenblas -Wl,-rpath,$(BLAS_DIR)
endif

# With a GPU and nvcc the same tests run there too.
ifneq ($(and $(shell command -v nvcc),$(shell nvidia-smi -L 2>/dev/null)),)
CUDA := test_cuda
endif

TESTS := test_tokenizer test_files test_plan test_model

.PHONY: train test test-programs demo bench profile deps clean
train: deps $(B)/train

deps:
	@tools/deps.sh

$(B)/train: examples/train.c tools/options.h tools/wordpiece.h mtt.h
	@mkdir -p $(B)
	$(CC) $(CFLAGS) $< -o $@ $(BLAS) -lm

$(B)/%: tests/%.c tests/test.h tools/wordpiece.h mtt.h
	@mkdir -p $(B)
	$(CC) $(CFLAGS) $< -o $@ -lm

$(B)/%: tools/%.c tools/options.h tools/wordpiece.h mtt.h
	@mkdir -p $(B)
	$(CC) $(CFLAGS) $< -o $@ -lm

$(B)/%: examples/%.c tools/options.h mtt.h
	@mkdir -p $(B)
	$(CC) $(CFLAGS) $< -o $@ -lm

# The same tests with the products of matrices from a BLAS.
$(B)/test_model_blas: tests/test_model.c tests/test.h mtt.h
	@mkdir -p $(B)
	$(CC) $(CFLAGS) $< -o $@ $(BLAS) -lm

$(B)/mtt_kernels.o: mtt_kernels.cu mtt.h
	@mkdir -p $(B)
	nvcc -O3 $(shell tools/arch.sh) -c $< -o $@

$(B)/test_cuda: tests/test_cuda.c tests/test.h tests/techniques.h mtt.h $(B)/mtt_kernels.o
	nvcc -O3 -Xcompiler -fopenmp $< $(B)/mtt_kernels.o -o $@ -lcublasLt

ifneq ($(CUDA),)
$(B)/profile: tools/profile.c tools/options.h mtt.h $(B)/mtt_kernels.o
	nvcc -O3 -DMTT_CUDA $< $(B)/mtt_kernels.o -o $@ -lcublasLt
endif

test: deps
	@$(MAKE) --no-print-directory test-programs

test-programs: $(B)/train $(B)/prepare $(B)/report $(B)/profile $(TESTS:%=$(B)/%) $(CUDA:%=$(B)/%) $(if $(BLAS),$(B)/test_model_blas)
	@tests/run.sh $(B) $(TESTS) $(CUDA) $(if $(BLAS),test_model_blas)

demo: deps
	@CC="$(CC)" tools/demo.sh "$(TEXT)" $(ARGS)

bench: deps
	@tools/bench.sh $(BENCH)

profile: deps $(B)/profile
	@$(B)/profile $(ARGS)

clean:
	rm -rf $(B) results
