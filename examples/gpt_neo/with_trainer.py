"""Fine-tune GPT-Neo with Transformers' Trainer: `deepspeed --num_gpus 2 examples/gpt_neo/with_trainer.py`."""

from __future__ import annotations

from common import choose_backend, load_model, parse_arguments, report, sequences, zero_config
from transformers import Trainer, TrainingArguments


def main() -> None:
    """Train, evaluate before and after, save."""
    arguments = parse_arguments(__doc__)
    cpu = choose_backend()
    training = TrainingArguments(  # before the model: at stage 3 it is then born sharded
        output_dir=str(arguments.output),
        deepspeed=zero_config(arguments),
        accelerator_config={"use_configured_state": cpu},
        use_cpu=cpu,
        bf16=not cpu,
        max_steps=arguments.steps,
        per_device_train_batch_size=arguments.micro,
        gradient_accumulation_steps=arguments.accumulate,
        learning_rate=arguments.lr,
        logging_steps=max(1, arguments.steps // 10),
        eval_on_start=True,
        save_strategy="no",
        report_to=[],
        seed=0,
    )
    tokenizer, rows, held_out = sequences(arguments)
    trainer = Trainer(
        model=load_model(arguments, tokenizer),
        args=training,
        train_dataset=rows,
        eval_dataset=held_out,
        processing_class=tokenizer,
    )
    trainer.train()
    after = trainer.evaluate()["eval_loss"]
    before = next(entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry)
    trainer.save_model()
    if trainer.is_world_process_zero():
        report(before, after, arguments, f"; saved in {arguments.output}")


if __name__ == "__main__":
    main()
