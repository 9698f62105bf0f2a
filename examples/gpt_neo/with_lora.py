"""Train LoRA adapters on a frozen, sharded GPT-Neo: `deepspeed --num_gpus 2 examples/gpt_neo/with_lora.py`."""

from __future__ import annotations

from common import choose_backend, load_model, parse_arguments, report, sequences, zero_config
from peft import LoraConfig, get_peft_model
from transformers import Trainer, TrainingArguments


def main() -> None:
    """As with_trainer.py, with the base frozen; only adapters are saved."""
    arguments = parse_arguments(__doc__)
    cpu = choose_backend()
    training = TrainingArguments(
        output_dir=str(arguments.output / "adapters"),
        deepspeed=zero_config(arguments),
        accelerator_config={"use_configured_state": cpu},
        use_cpu=cpu,
        bf16=not cpu,
        max_steps=arguments.steps,
        per_device_train_batch_size=arguments.micro,
        gradient_accumulation_steps=arguments.accumulate,
        learning_rate=10 * arguments.lr,
        logging_steps=max(1, arguments.steps // 10),
        eval_on_start=True,
        save_strategy="no",
        report_to=[],
        seed=0,
    )
    tokenizer, rows, held_out = sequences(arguments)
    base = load_model(arguments, tokenizer)
    adapters = LoraConfig(r=8, target_modules=["q_proj", "v_proj", "c_fc", "c_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(base, adapters)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    total = sum(p.numel() for p in model.parameters())
    trainer = Trainer(model=model, args=training, train_dataset=rows, eval_dataset=held_out, processing_class=tokenizer)
    trainer.train()
    after = trainer.evaluate()["eval_loss"]
    before = next(entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry)
    trainer.save_model()
    if trainer.is_world_process_zero():
        size = (arguments.output / "adapters" / "adapter_model.safetensors").stat().st_size
        print(f"{trained:,} of {total:,} parameters were trained; the adapters take {size / 1024:.0f} KiB on disk")
        report(before, after, arguments, f"; adapters in {arguments.output / 'adapters'}")


if __name__ == "__main__":
    main()
