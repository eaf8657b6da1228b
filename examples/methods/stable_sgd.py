"""Stable SGD: naive SGD in a regime that forgets little.

Dropout, momentum, and a learning rate that decays from task to task: the settings are the method.
Mirzadeh et al. 2020, https://arxiv.org/abs/2006.06958.
"""

from .naive import Naive


class StableSGD(Naive):
    pass
