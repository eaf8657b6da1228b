"""Continual learning with ensembles: the experiments of Doan et al. 2023 on ensemblayers."""
