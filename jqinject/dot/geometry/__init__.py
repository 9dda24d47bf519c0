"""Which axis goes where: dimension numbers, equations, patches, tiles."""
