"""Which backend, precision and layout serve a model best on this device, within its objective and its accuracy."""
