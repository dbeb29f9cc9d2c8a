"""Number formats, quantisers and rotations: a tensor in few bits an element and back, the same on every device."""
