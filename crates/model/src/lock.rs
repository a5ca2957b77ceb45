//! Locking of mutexes whose content is whole after each statement.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks a mutex, also after a panic of another thread that had it. Only for content that is whole
/// after each statement under the lock, so that nothing half done can be met.
pub fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[test]
    fn a_panic_of_another_thread_leaves_the_content() {
        let mutex = Arc::new(Mutex::new(1));
        let other = mutex.clone();
        let died = std::thread::spawn(move || {
            *lock(&other) = 2;
            let _held = lock(&other);
            panic!("on purpose");
        });
        died.join().unwrap_err();
        assert_eq!((mutex.is_poisoned(), *lock(&mutex)), (true, 2));
    }
}
