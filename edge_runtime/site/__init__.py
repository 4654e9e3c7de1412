"""What a device publishes of its site: results of cameras and folders, and what Home Assistant discovers."""
