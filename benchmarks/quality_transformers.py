"""transformers' Seq2SeqTrainer on words and phonemes, beside which benchmarks/time_to_quality.py runs ours.

Has a process without JAX.
"""

import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any


def train(
    examples: str,
    sizes: dict[str, Any],
    label_smoothing: float,
    max_length: int,
    seconds: float,
    num_steps: int,
    num_words: int,
    num_evaluations: int,
    speed_seconds: float,
    begin: float,
    optimizer: str,
    learning_rate: float,
    schedule: str,
    batch_size: int,
    dtype: str,
) -> list[dict[str, float]]:
    """Train for some seconds or steps; return the seconds since the start, step and word error of each evaluation.

    The last one has the loss, too, which is computed after the end, in nats per token of the first pronunciations.
    `examples`: a file, {split: [[ids of the letters, [ids of a pronunciation, ...]], ...]}, with EOS. An epoch has
    one pronunciation of each word, drawn at random. `begin`: the time of the start, as time.monotonic has it;
    `num_steps`: 0 for as many as take `seconds`, after `speed_seconds` in which the speed is measured, which are not
    counted. `optimizer`: as the Trainer names it, or adafactor_scaled, transformers' Adafactor with updates in
    proportion to the parameters.
    """
    import torch
    import transformers

    torch.manual_seed(0)
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    with open(examples) as file:
        words = json.load(file)
    config = transformers.T5Config(
        **sizes,
        feed_forward_proj='gated-gelu',
        tie_word_embeddings=False,
        decoder_start_token_id=0,
        pad_token_id=0,
        eos_token_id=1,
    )
    model = transformers.T5ForConditionalGeneration(config)
    # Version 5 ties the embeddings whatever the config says. The scale is near ours, 1 / sqrt(d_model).
    model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight) * 0.05)
    draw = random.Random(0)

    class Words(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return len(words['train'])

        def __getitem__(self, i: int) -> dict[str, list[int]]:
            letters, pronunciations = words['train'][i]
            return {'input_ids': letters, 'labels': draw.choice(pronunciations)}

    def padded(rows: list[list[int]], value: int) -> torch.Tensor:
        length = max(map(len, rows))
        return torch.tensor([row + [value] * (length - len(row)) for row in rows])

    def collate(batch: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
        inputs = padded([example['input_ids'] for example in batch], 0)
        labels = padded([example['labels'] for example in batch], -100)
        shifted = torch.nn.functional.pad(labels.clamp(min=0)[:, :-1], (1, 0))
        return {
            'input_ids': inputs,
            'attention_mask': (inputs > 0).long(),
            'labels': labels,
            'decoder_input_ids': shifted,  # with label smoothing the Trainer computes the loss
        }

    def tested_batches() -> Iterator[tuple[list, torch.Tensor, torch.Tensor]]:
        """Yield some words of the test, with their letters and mask."""
        tested = sorted(words['test'][:num_words], key=lambda word: len(word[0]))
        for i in range(0, len(tested), 256):
            batch = tested[i : i + 256]
            inputs = padded([letters for letters, _ in batch], 0)
            yield batch, inputs, (inputs > 0).long()

    @torch.no_grad()
    def word_error() -> float:
        model.eval()
        num_wrong = 0
        num_tested = 0
        for batch, inputs, mask in tested_batches():
            answers = model.generate(
                inputs, attention_mask=mask, max_length=1 + max_length, do_sample=False
            )
            for row, (_, pronunciations) in zip(answers.tolist(), batch, strict=True):
                answer = row[1:]
                if 1 in answer:
                    answer = answer[: answer.index(1) + 1]
                num_wrong += answer not in pronunciations
            num_tested += len(batch)
        model.train()
        return 100 * num_wrong / num_tested

    @torch.no_grad()
    def loss() -> float:
        model.eval()
        nats = 0.0
        num_tokens = 0
        for batch, inputs, mask in tested_batches():
            labels = padded([pronunciations[0] for _, pronunciations in batch], -100)
            num_labels = int((labels >= 0).sum())
            nats += num_labels * float(model(inputs, mask, labels=labels).loss)
            num_tokens += num_labels
        return nats / num_tokens

    def make_trainer(folder: str, num_steps: int, callbacks: list) -> transformers.Trainer:
        by_length: dict[str, Any] = {'train_sampling_strategy': 'group_by_length'}
        if int(transformers.__version__.split('.')[0]) < 5:
            by_length = {'group_by_length': True}
        arguments = transformers.Seq2SeqTrainingArguments(
            output_dir=folder,
            max_steps=num_steps,
            per_device_train_batch_size=batch_size,
            optim=optimizer.removesuffix('_scaled'),
            learning_rate=learning_rate,
            lr_scheduler_type=schedule,
            warmup_steps=min(500, num_steps // 10),
            label_smoothing_factor=label_smoothing,
            bf16=dtype == 'bfloat16',
            use_cpu=True,
            save_strategy='no',
            logging_strategy='no',
            report_to=[],
            disable_tqdm=True,
            remove_unused_columns=False,
            **by_length,
        )
        trainer = transformers.Seq2SeqTrainer(
            model=model,
            args=arguments,
            train_dataset=Words(),
            data_collator=collate,
            callbacks=callbacks,
        )
        if optimizer == 'adafactor_scaled':  # the Trainer's own is not scaled
            trainer.optimizer = transformers.Adafactor(
                model.parameters(), lr=learning_rate, scale_parameter=True, relative_step=False
            )
        return trainer

    class StepTimer(transformers.TrainerCallback):
        """Measures the speed, and ends after some seconds."""

        times: list[float] = []

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.times.append(time.monotonic())
            passed = self.times[-1] - self.times[0]
            control.should_training_stop = passed > speed_seconds and state.global_step > 5

    class Evaluations(transformers.TrainerCallback):
        found: list[dict[str, float]] = []

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step % (state.max_steps // num_evaluations) == 0:
                error = word_error()
                passed = time.monotonic() - begin - uncounted
                found = {'seconds': passed, 'word_error': error, 'step': state.global_step}
                self.found.append(found)
                print(found, file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory() as folder:
        begin_timing = time.monotonic()
        if not num_steps:
            initial = {name: x.clone() for name, x in model.state_dict().items()}
            make_trainer(folder, 10**6, [StepTimer()]).train()
            times = StepTimer.times
            num_steps = int(seconds * (len(times) - 1) / (times[-1] - times[0]))
            num_steps = max(num_evaluations, num_steps - num_steps % num_evaluations)
            model.load_state_dict(initial)
        uncounted = time.monotonic() - begin_timing
        make_trainer(folder, num_steps, [Evaluations()]).train()
    Evaluations.found[-1]['loss'] = loss()
    return Evaluations.found


if __name__ == '__main__':
    print(json.dumps(train(**json.loads(sys.argv[1]))))
