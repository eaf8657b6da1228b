"""The operations behind the layers and optimizers, one file each; nothing is built on import."""
