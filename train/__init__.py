"""normfuse.train"""
