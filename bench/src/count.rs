//! An allocator that counts while it is told to.

use std::{
    alloc::{GlobalAlloc, Layout, System},
    sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering::Relaxed},
};

pub struct Counted;

static ON: AtomicBool = AtomicBool::new(false);
static BYTES: AtomicI64 = AtomicI64::new(0);
static CALLS: AtomicU64 = AtomicU64::new(0);

/// Counts from zero.
pub fn start() {
    BYTES.store(0, Relaxed);
    CALLS.store(0, Relaxed);
    ON.store(true, Relaxed);
}

/// Ends counting. Returns how many of the allocated bytes are still held, and the number of
/// allocations.
pub fn stop() -> (i64, u64) {
    ON.store(false, Relaxed);
    (BYTES.load(Relaxed), CALLS.load(Relaxed))
}

/// How many of the bytes that were allocated since the start are still held.
pub fn held() -> i64 {
    BYTES.load(Relaxed)
}

fn count(bytes: i64, calls: u64) {
    if ON.load(Relaxed) {
        BYTES.fetch_add(bytes, Relaxed);
        CALLS.fetch_add(calls, Relaxed);
    }
}

// SAFETY: every call is passed on to the system's allocator.
unsafe impl GlobalAlloc for Counted {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as i64, 1);
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        count(-(layout.size() as i64), 0);
        unsafe { System.dealloc(at, layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count(size as i64 - layout.size() as i64, 1);
        unsafe { System.realloc(at, layout, size) }
    }
}
