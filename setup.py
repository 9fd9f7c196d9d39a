"""Dependencies. One runs from the checkout: modules named `data` and `model` are not published."""

from setuptools import setup

setup(
    name='t5-haiku',
    version='0.1.0',
    python_requires='>=3.11',
    py_modules=[],
    install_requires=[
        *('absl-py>=2.1', 'dm-haiku>=0.0.17', 'jax>=0.10', 'ml-collections>=1.0', 'msgpack>=1.0.5'),
        *('numpy>=2.0', 'optax>=0.2.6', 'sentencepiece>=0.2.0', 'tensorboard>=2.18'),
        *('tensorstore>=0.1.71', 'google-crc32c>=1.5', 'ml-dtypes>=0.5', 'safetensors>=0.4.3'),
    ],
    extras_require={
        'test': ['chex>=0.1.90', 'mypy>=1.11', 'pytest>=8', 'pytest-xdist>=3.5', 'ruff>=0.9'],
        'peers': ['torch>=2.6', 'transformers>=4.57', 'seqio-nightly'],  # tests compare with them
        'tf': ['tensorflow-cpu>=2.20'],  # one test writes a checkpoint with it
        **{'gcs': ['etils[epath-gcs]>=1.12'], 's3': ['etils[epath-s3]>=1.12']},  # gs://, s3://
        **{'cuda': ['jax[cuda12]'], 'tpu': ['jax[tpu]']},
    },
)
