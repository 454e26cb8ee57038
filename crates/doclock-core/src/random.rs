//! The source of all random values in the manager and the embedded store.
//!
//! With the feature `_simulation` a test can seed it, so that a simulation is exactly repeatable. For the
//! same reason no `select!` in the manager chooses its branch at random.

use uuid::Uuid;

/// The standard map. With `_simulation`, all maps hash alike, so that their order of iteration is the same
/// in each run.
#[cfg(feature = "_simulation")]
pub type HashMap<K, V> = std::collections::HashMap<
    K,
    V,
    std::hash::BuildHasherDefault<std::collections::hash_map::DefaultHasher>,
>;
#[cfg(not(feature = "_simulation"))]
pub type HashMap<K, V> = std::collections::HashMap<K, V>;

#[cfg(not(feature = "_simulation"))]
pub fn uuid() -> Uuid {
    Uuid::new_v4()
}

#[cfg(feature = "_simulation")]
pub fn uuid() -> Uuid {
    SEEDED.with(|seeded| match seeded.get() {
        None => Uuid::new_v4(),
        Some(seed) => {
            let (seed, high) = next(seed);
            let (seed, low) = next(seed);
            seeded.set(Some(seed));
            uuid::Builder::from_random_bytes(
                ((u128::from(high) << 64) | u128::from(low)).to_be_bytes(),
            )
            .into_uuid()
        }
    })
}

#[cfg(feature = "_simulation")]
thread_local! {
    static SEEDED: std::cell::Cell<Option<u64>> = const { std::cell::Cell::new(None) };
}

/// Makes all random values of the crate on this thread depend on `seed` alone: tokens, ids, the jitter of
/// pauses. For a simulation on one thread, never for a server: anybody could guess the next values.
#[cfg(feature = "_simulation")]
pub fn seed_randomness(seed: u64) {
    SEEDED.set(Some(seed));
}

/// SplitMix64 (Steele, Lea, Flood: OOPSLA 2014).
#[cfg(feature = "_simulation")]
fn next(seed: u64) -> (u64, u64) {
    let seed = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mixed = (seed ^ (seed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    (seed, mixed ^ (mixed >> 31))
}
