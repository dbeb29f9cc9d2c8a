"""What keeps low-bit training stable beside rounding and rotation: OsciReset, OutControl, dynamic clamping."""
