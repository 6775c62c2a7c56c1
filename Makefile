# make demo    - trains a small model with ten techniques: what each saves and costs   (TEXT=my_text.txt)
# make test    - everything that can be proven on this machine
# make fuzz    - every reader of foreign bytes, with clang's libFuzzer, a minute each   (MINUTES=10)
# make train   - the trainer, build/train
# make hello   - the shortest program, build/hello, trained on a text   (TEXT=my_text.txt)
# make bench   - a step's time and memory on a GPU, beside PyTorch's (BENCH='a128 gpt2_16')
# make profile - the time of each operation of a step   (ARGS="gpt2_16 gpt2_64"; without it says how)
# make page    - examples/learn/memory.html again, the page that plans, after a change of mtt.h
CC     ?= cc
CFLAGS ?= -O3 -march=native
override CFLAGS += -std=gnu99 -Wall -Wextra $(shell tools/openmp.sh $(CC))
B      := build
VPATH  := examples examples/assignment tools tests tests/units
export OMP_WAIT_POLICY ?= passive# threads that spin slow each other down on a busy machine
# OpenBLAS if it is there. It must be the build for OpenMP: threads of its own would wait for OpenMP's.
BLAS_DIR := $(firstword $(wildcard /usr/lib/$(shell $(CC) -print-multiarch 2>/dev/null)/openblas-openmp))
ifneq ($(BLAS_DIR),)
BLAS := -DMTT_CBLAS -L$(BLAS_DIR) -lopenblas -Wl,-rpath,$(BLAS_DIR)
endif
# With a GPU and nvcc the tests run there, too.
CUDA := $(and $(shell command -v nvcc),$(shell tools/arch.sh gpu 2>/dev/null),test_cuda test_together_cuda)
TESTS    := $(addprefix test_,tokenizer files structs ranks identity plan model models generate together)
TESTS    += test_memory $(if $(BLAS),test_model_blas test_memory_blas) $(CUDA)
PROGRAMS := train tiny hello generate schedule prepare report profile convert
HEADERS  := mtt.h $(wildcard tools/*.h tests/*.h)
# Recipes take these from the environment, so that neither make nor the shell expands what they hold.
$(foreach v,TEXT BENCH ARGS,$(eval override export $v := $$(value $v)))
.PHONY: train hello test test-programs fuzz demo bench profile page deps clean
train: deps $(B)/train
hello: deps $(B)/hello
	@$(B)/hello $${TEXT:+"$$TEXT"}
deps:; @mkdir -p $(B) && tools/deps.sh

# One object has mtt.h's implementation for all programs; each test has its own, with what is private.
APART = $(CC) $(CFLAGS) -DMTT_IMPLEMENTATION_DONE $< $(filter %.o,$^) -o $@ $(LIBRARIES) -lm
WHOLE = $(CC) $(CFLAGS) $(if $(filter %files %models %structs,$@),-O1) -DMTT_STATIC $< -o $@ $(LIBRARIES) -lm
NVCC  = nvcc -O3 -DMTT_CUDA= -Xcompiler -fopenmp $< $(B)/mtt_kernels.o -o $@ -lcublasLt
$(addprefix $(B)/,train tiny hello %_blas mtt_blas.o): LIBRARIES = $(BLAS)
$(B)/mtt.o $(B)/mtt_blas.o: tools/wordpiece.h mtt.h | deps
	$(CC) $(CFLAGS) -DMTT_IMPLEMENTATION -include mtt.h -x c -c $< -o $@ $(filter -D%,$(LIBRARIES))
$(B)/train: trainer.c $(HEADERS) $(B)/mtt_blas.o; $(APART)
$(B)/tiny: train.c $(HEADERS) $(B)/mtt_blas.o; $(APART)
$(B)/hello: hello.c $(HEADERS) $(B)/mtt_blas.o; $(APART)
$(B)/test_%_blas: test_%.c $(HEADERS) | deps; $(WHOLE)
$(B)/test_%: test_%.c $(HEADERS) | deps; $(WHOLE)
$(B)/%: %.c $(HEADERS) $(B)/mtt.o; $(APART)
$(B)/mtt_kernels.o: mtt_kernels.cu mtt.h | deps; nvcc -O3 $(shell tools/arch.sh) -c $< -o $@
$(B)/test_cuda $(if $(CUDA),$(B)/profile): $(B)/%: %.c $(HEADERS) $(B)/mtt_kernels.o; $(NVCC)
$(B)/train_cuda: trainer.c $(HEADERS) $(B)/mtt_kernels.o; $(NVCC)
$(B)/%_cuda: %.c $(HEADERS) $(B)/mtt_kernels.o; $(NVCC)
test: deps; @echo about 5 minutes; tools/arch.sh gpu >/dev/null; $(MAKE) --no-print-directory test-programs
test-programs: $(PROGRAMS:%=$(B)/%) $(TESTS:%=$(B)/%)
	@tests/run.sh $(B) $(TESTS)
demo:; @set -f; CC="$(CC)" tools/demo.sh "$$TEXT" $$ARGS
bench: deps; @set -f; tools/bench.sh $$BENCH
profile: $(B)/profile; @set -f; tools/profile.sh $$ARGS
fuzz: deps; @tests/fuzz.sh $(B) $$((60 * $(or $(MINUTES),1)))
page:; tools/planner/make.sh examples/learn/memory.html
clean:; rm -rf $(B)
