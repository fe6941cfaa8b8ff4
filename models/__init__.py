"""normfuse.models"""
