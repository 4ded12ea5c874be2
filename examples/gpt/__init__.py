"""A GPT that learns English in float32, float16 and FP8 with one and the same training step.

Run `python -m examples.gpt --help` from the root of the repository. One idea a file:

- `config.py`: the sizes, from `tiny` (two CPU cores) to `gpt2-168m`;
- `presets.py`: the precisions, which are the rows of the final table;
- `model.py`: the transformer, an ordinary Flax NNX module;
- `step.py`: the training step, the only place where precision and scales appear; `train.py`
  freezes the scales of its state, if `--freeze-after` says so;
- `tracking.py`: scales and ranges of the values in the step, recorded as `--track` says;
- `data.py`, `checkpoint.py`, `records.py`, `train.py`, `report.py`, `cli.py`: what any training
  script needs.
"""
