"""Which pushes are admitted when, decided from the clocks of the live workers."""
