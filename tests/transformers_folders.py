"""Folders of transformers and peft for tests: a small model's sizes, changes of files, logits of torch's modules."""

import json

import numpy as np
from safetensors.numpy import load_file, save_file

SIZES = {
    'vocab_size': 96,
    'dtype': 'float32',
    'emb_dim': 16,
    'num_heads': 2,
    'num_encoder_layers': 3,
    'num_decoder_layers': 2,
    'head_dim': 6,
    'mlp_dim': 24,
    'mlp_activations': ('gelu', 'linear'),
    'dropout_rate': 0.1,
    'logits_via_embedding': False,
    'float32_attention_logits': False,
    'relpos_bias_per_layer': False,
}


def edit_json(file, **changes):
    """Changes some keys; None removes one."""
    content = json.loads(file.read_text()) | changes
    for key, value in changes.items():
        if value is None:
            content.pop(key)
    file.write_text(json.dumps(content))


def edit_arrays(file, **changes):
    """Changes some arrays, '__' in a name standing for '.'; None removes one."""
    changes = {name.replace('__', '.'): x for name, x in changes.items()}
    arrays = load_file(file) | changes
    save_file({name: x for name, x in arrays.items() if x is not None}, file, {'format': 'pt'})


def name_mt5(folder):
    """Write an mt5's own name into its config.json; it is a t5 to us."""
    architectures = ['MT5ForConditionalGeneration']
    edit_json(folder / 'config.json', model_type='mt5', architectures=architectures)


def token_batch(vocab_size, rows=3, inputs=13, targets=7):
    """Rows of several lengths, T5X's features."""
    rng = np.random.default_rng(1)
    encoder = rng.integers(2, vocab_size, [rows, inputs], np.int32)
    encoder[0, 4:] = 0
    decoder = rng.integers(2, vocab_size, [rows, targets], np.int32)
    shifted = np.pad(decoder, [(0, 0), (1, 0)])[:, :-1]
    names = ('encoder_input_tokens', 'decoder_input_tokens', 'decoder_target_tokens')
    return dict(zip(names, (encoder, shifted, decoder), strict=True))


def their_logits(module, batch):
    import torch

    inputs = torch.tensor(batch['encoder_input_tokens']).long()
    shifted = torch.tensor(batch['decoder_input_tokens']).long()
    mask = (inputs > 0).long()
    with torch.no_grad():
        outputs = module.eval()(input_ids=inputs, attention_mask=mask, decoder_input_ids=shifted)
    return outputs.logits.numpy()
