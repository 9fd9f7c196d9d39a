"""transformers' Seq2SeqTrainer on words and phonemes, which benchmarks/time_to_quality.py measures against ours.

Runs in a process without JAX.
"""

import json
import os
import random
import sys
import tempfile
import time
from typing import Any

LEARNING_RATE = 0.03
BATCH_SIZE = 64


def train(
    examples: str,
    sizes: dict[str, Any],
    label_smoothing: float,
    max_length: int,
    num_words: int,
    num_evaluations: int,
    begin: float,
    dtype: str,
    seconds: float = 0.0,
    num_steps: int = 0,
) -> Any:
    """Train for `seconds` and return the steps per second; or train for `num_steps` and evaluate.

    An evaluation returns the seconds since the start and the word error. `examples`: a file, {split: [[ids of
    the letters, [ids of a pronunciation, ...]], ...]}, with EOS. An epoch has one random pronunciation of each
    word. `begin`: time.monotonic at the start.
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
            'decoder_input_ids': shifted,  # with label smoothing, the Trainer computes the loss
        }

    @torch.no_grad()
    def word_error() -> float:
        model.eval()
        test_words = sorted(words['test'][:num_words], key=lambda word: len(word[0]))
        num_wrong = 0
        for i in range(0, len(test_words), 256):
            batch = test_words[i : i + 256]
            inputs = padded([letters for letters, _ in batch], 0)
            mask = (inputs > 0).long()
            answers = model.generate(
                inputs, attention_mask=mask, max_length=1 + max_length, do_sample=False
            )
            for row, (_, pronunciations) in zip(answers.tolist(), batch, strict=True):
                answer = row[1:]
                if 1 in answer:
                    answer = answer[: answer.index(1) + 1]
                num_wrong += answer not in pronunciations
        model.train()
        return 100 * num_wrong / len(test_words)

    times = []
    evaluations = []

    class Callback(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            times.append(time.monotonic())
            if seconds:
                control.should_training_stop = times[-1] - times[0] > seconds and len(times) > 5
            elif state.global_step % (num_steps // num_evaluations) == 0:
                error = word_error()
                evaluations.append((time.monotonic() - begin, error))

    by_length: dict[str, Any] = {'train_sampling_strategy': 'group_by_length'}
    if int(transformers.__version__.split('.')[0]) < 5:
        by_length = {'group_by_length': True}
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.Seq2SeqTrainingArguments(
            output_dir=folder,
            max_steps=num_steps or 10**6,
            per_device_train_batch_size=BATCH_SIZE,
            optim='adafactor',
            learning_rate=LEARNING_RATE,
            lr_scheduler_type='linear',
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
            callbacks=[Callback()],
        )
        # The Trainer's default does not scale updates by the parameters.
        trainer.optimizer = transformers.Adafactor(
            model.parameters(), lr=LEARNING_RATE, scale_parameter=True, relative_step=False
        )
        trainer.train()
    if seconds:
        return (len(times) - 1) / (times[-1] - times[0])
    return evaluations


if __name__ == '__main__':
    print(json.dumps(train(**json.loads(sys.argv[1]))))
