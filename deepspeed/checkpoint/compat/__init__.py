"""Reading and writing of upstream DeepSpeed's checkpoint layout, and conversion to full weights."""
