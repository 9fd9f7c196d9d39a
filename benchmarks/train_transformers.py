"""The train step of transformers, which benchmarks/train.py measures against ours.

Runs in a process without JAX: torch.compile inspects all modules, and fails for some of Haiku's.
"""

import json
import os
import resource
import sys
import time
from typing import Any


def measure(
    sizes: dict[str, Any],
    lengths: list[int],
    weights: str,
    dtype: str,
    device: str,
    batch_size: int,
    num_warm_up_steps: int,
    num_steps: int,
) -> dict[str, Any]:
    """Return the seconds of a step, the number of parameters and the peak memory.

    `sizes`: settings of a T5Config or, with encoder_attention_type, of a LongT5Config; `lengths`: of
    inputs and targets; `weights`: the dtype of the parameters, over which another `dtype` is autocast;
    `device`: cpu or cuda.
    """
    import torch
    import transformers

    torch.manual_seed(0)
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    torch.set_float32_matmul_precision('high')  # as JAX multiplies float32 on a GPU
    synchronize = getattr(torch, device).synchronize
    config = transformers.T5Config
    attention = 'sdpa'
    if 'encoder_attention_type' in sizes:
        config = transformers.LongT5Config
        attention = 'eager'  # it has no other
    with torch.device(device):
        model = transformers.AutoModelForSeq2SeqLM.from_config(
            config(**sizes),
            attn_implementation=attention,
            dtype=getattr(torch, weights),
        )
        # Version 5 ties the embeddings whatever the config says.
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
        inputs, targets = (
            torch.randint(2, model.config.vocab_size, (batch_size, n)) for n in lengths
        )
    model.train()
    optimizer = transformers.Adafactor(
        model.parameters(), lr=1e-3, scale_parameter=False, relative_step=False
    )
    forward = torch.compile(model) if device == 'cuda' else model

    def take_steps(count: int) -> Any:
        for _ in range(count):
            with torch.autocast(device, getattr(torch, dtype), enabled=dtype != weights):
                loss = forward(input_ids=inputs, labels=targets).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        synchronize()
        return loss

    take_steps(num_warm_up_steps)
    start = time.perf_counter()
    loss = take_steps(num_steps)
    seconds = time.perf_counter() - start
    assert torch.isfinite(loss)
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if device == 'cuda':
        peak_bytes = torch.cuda.max_memory_allocated()
    return {
        'seconds': seconds / num_steps,
        'num_parameters': sum(x.numel() for x in model.parameters()),
        'peak_bytes': peak_bytes,
    }


if __name__ == '__main__':
    print(json.dumps(measure(**json.loads(sys.argv[1]))))
