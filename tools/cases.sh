# cases.sh - the models whose steps bench.sh times and profile.sh takes apart. Read by both.
export LC_ALL=C # decimals have a point

# benchmark NAME MODE_OF_PYTORCH TITLE TECHNIQUE,.. OPTION...: TECHNIQUE:N has chunks of N rows. A mode takes
# up to half a minute to compile, so a case has the faster one of compile and graphs.
declare -A modes title techniques model
order=()
benchmark() {
  order+=("$1")
  modes[$1]=$2 title[$1]=$3 techniques[$1]=$4
  model[$1]=${*:5}
}
a="--layers 4 --heads 8 --d-model 256 --vocab-size 50257 --seq-len 256"
d="--layers 12 --heads 12 --d-model 768 --vocab-size 30000 --seq-len 1024"
head="--vocab-size 50304 --positions learned --head tied --no-head-bias"
gpt2="--layers 12 --heads 12 --d-model 768 --seq-len 1024 $head"
best=flash_selective_chunked_compact
benchmark a128 graphs "model A, 128 x 256" \
  flash,fp8_flash,$best:3072,flash_segments_chunked_compact:1536 $a --batch-size 128
benchmark a128_dropout graphs "model A, 128 x 256, dropout 0.1" flash $a --batch-size 128 --dropout 0.1
benchmark a128_tf32 compile "model A, 128 x 256, TF32" tf32,tf32_chunked:32768 $a --batch-size 128
benchmark a32 graphs "model A, 32 x 256" flash,$best $a --batch-size 32
benchmark b64 compile "model B, 64 x 512" flash,fp8_flash,flash_selective_chunked \
  --layers 6 --heads 8 --d-model 512 --vocab-size 10000 --seq-len 512 --batch-size 64
benchmark d32 compile "model D, 32 x 1024" \
  flash,fp8_flash,flash_selective_chunked,flash_checkpointing_chunked $d --batch-size 32
benchmark d32_dropout compile "model D, 32 x 1024, dropout 0.1" flash $d --batch-size 32 --dropout 0.1
benchmark gpt2_16 graphs "GPT-2 124M, 16 x 1024" flash,fp8_flash,fp8_flash_compact,$best $gpt2 --batch-size 16
benchmark gpt2_16_dropout graphs "GPT-2 124M, 16 x 1024, dropout 0.1" flash \
  $gpt2 --batch-size 16 --dropout 0.1
benchmark gpt2_16_fp8 compile "GPT-2 124M, 16 x 1024, PyTorch in FP8 (torchao)" fp8_flash \
  $gpt2 --batch-size 16
benchmark gpt2_64 compile "GPT-2 124M, 64 x 1024" flash,fp8_flash,fp8_flash_compact,$best \
  $gpt2 --batch-size 64
medium="--layers 24 --heads 16 --d-model 1024 --seq-len 1024 $head --batch-size 16"
large="--layers 48 --heads 25 --d-model 1600 --seq-len 1024 $head --batch-size 8"
benchmark gpt2m_16 compile "GPT-2 355M, 16 x 1024" flash,fp8_flash,fp8_flash_compact,flash_selective_chunked \
  $medium
least=checkpointing_chunked_compact
for n in 2 4 8; do
  ranks="--ranks $n --shard gradients" where="on each of $n GPUs"
  benchmark gpt2_16_ranks$n compile "GPT-2 124M, 16 x 1024 $where" flash,fp8_flash \
    $gpt2 --batch-size 16 $ranks
  benchmark gpt2_64_ranks$n compile "GPT-2 124M, 64 x 1024 $where" flash $gpt2 --batch-size 64 $ranks
  benchmark gpt2m_16_ranks$n compile "GPT-2 355M, 16 x 1024 $where" flash $medium $ranks
  benchmark gpt2xl_8_ranks$n "" "GPT-2 1.5B, 8 x 1024 $where" flash_$least,fp8_flash_$least $large $ranks
done
benchmark gpt2xl_8 "" "GPT-2 1.5B, 8 x 1024" \
  flash_$least,flash_segments_chunked_compact_early,fp8_flash_$least $large
benchmark long compile "GPT-2 124M, 1 x 32768" flash,flash_checkpointing_chunked_compact \
  $gpt2 --seq-len 32768 --batch-size 1
llama="--layers 12 --d-model 768 --d-ff 2048 --norm rms --mlp swiglu --positions rotary --no-biases"
llama+=" --vocab-size 50304 --head tied --seq-len 1024"
benchmark llama_16 graphs "Llama form 124M, 16 x 1024" flash,fp8_flash,$best $llama --heads 12 --batch-size 16
benchmark llama_16_d128 graphs "Llama form 124M, 6 heads of 128, 16 x 1024" flash,fp8_flash,$best \
  $llama --heads 6 --batch-size 16
gqa="--layers 1 --vocab-size 256 --only flash --seq-len"
for heads in 12:4 16:2; do # attention alone
  for k in 1 4 16; do
    benchmark gqa${heads%:*}_${k}k eager "attention, heads $heads of 64, $((16 / k)) x $((k * 1024))" flash \
      $gqa $((k * 1024)) --batch-size $((16 / k)) --heads ${heads%:*} --heads-kv ${heads#*:} \
      --d-model $((64 * ${heads%:*}))
  done
done
for n in 1 8 32 128; do
  benchmark gpt2_generate_$n graphs "GPT-2 124M, $n sequence$([ $n = 1 ] || echo s), a token each" bf16 \
    $gpt2 --batch-size $n --generate 512
done
benchmark largest "" "" ""
all="${order[*]}"
tiny="--layers 2 --heads 4 --d-model 64 --vocab-size 1000 --seq-len 64 --batch-size 4"
benchmark tiny compile "tiny, 4 x 64" flash,fp8_flash,$best $tiny
benchmark tiny_ranks2 compile "tiny, 4 x 64 on each of 2 ranks" flash $tiny --ranks 2 --shard gradients
benchmark tiny_dropout compile "tiny, 4 x 64, dropout 0.1" flash $tiny --dropout 0.1
benchmark tiny_llama compile "tiny Llama form, 4 x 64" flash,fp8_flash,$best $llama \
  --layers 2 --heads 4 --heads-kv 2 --d-model 64 --d-ff 256 --vocab-size 1000 --seq-len 64 --batch-size 4
benchmark tiny_gqa eager "attention, heads 12:4 of 64, 4 x 64" flash \
  $gqa 64 --batch-size 4 --heads 12 --heads-kv 4 --d-model 768
benchmark tiny_generate "eager graphs" "tiny, 40 new tokens, a token" bf16 \
  --layers 2 --heads 4 --d-model 64 --vocab-size 1000 --seq-len 64 $head --batch-size 1 --generate 40
