"""Do learning rates transfer under u-µP?"""
