"""Values and gradients of two functions, in double precision."""

import points
import torch
import torch.nn.functional as F

CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


def rand(*shape, grad=True):
    return points.rand(*shape).requires_grad_(grad)


def simplex(*size):
    return points.simplex(*size).requires_grad_()


def assert_same(f, reference, *tensors):
    """Output and every gradient of two functions, at one random cotangent."""
    tensors = [t for t in tensors if t is not None]
    y, z = f(), reference()
    torch.testing.assert_close(y, z)
    g = torch.randn_like(z)
    gradients = (torch.autograd.grad(own, tensors, g) for own in (y, z))
    torch.testing.assert_close(*gradients)


def strided(x):
    """Views with x's values under other strides."""
    yield x.transpose(0, -1).contiguous().transpose(0, -1)
    yield torch.stack([x, x], -1)[..., 0]
    yield torch.cat([x, x], 1)[:, : x.shape[1]]
    yield x[:1].expand_as(x)
