"""normfuse.layers"""
