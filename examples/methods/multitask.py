"""Multitask training: one network on all tasks at once, the upper bound."""

from .method import Method


class Multitask(Method):
    ensemble = False
    joint = True
