"""normfuse.native"""
