//! A loadable libnvidia-ml.so.1 over the simulator, its state in a locked file.
