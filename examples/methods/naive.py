"""Naive SGD: one network, fine-tuned on one task after the other."""

from .method import Method


class Naive(Method):
    ensemble = False
