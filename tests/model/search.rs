//! Breadth-first search over all reachable states, so that the first counter-example is a shortest one.

use std::{
    collections::HashMap,
    fmt,
    hash::{BuildHasherDefault, Hash, Hasher},
};

/// A model whose states list the steps that are possible from them.
pub(crate) trait Model {
    type State: Copy + Eq + Hash;
    type Step: Copy + fmt::Display;
    type Broken: Copy + PartialEq + fmt::Debug;

    fn begin(&self) -> Self::State;

    /// The steps that are possible in this state, where they lead, and what they break.
    fn steps(&self, from: &Self::State, to: &mut Vec<Next<Self>>);
}

pub(crate) struct Next<M: Model + ?Sized> {
    pub(crate) step: M::Step,
    pub(crate) state: M::State,
    pub(crate) broken: Option<M::Broken>,
}

/// The steps that lead to a violation.
pub(crate) struct Story<M: Model + ?Sized> {
    pub(crate) broken: M::Broken,
    pub(crate) steps: Vec<M::Step>,
}

impl<M: Model> fmt::Display for Story<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, step) in self.steps.iter().enumerate() {
            writeln!(f, "{:>3}. {step}", at + 1)?;
        }
        write!(f, "     => {:?}", self.broken)
    }
}

/// All reachable states.
pub(crate) struct Explored<M: Model> {
    pub(crate) states: Vec<M::State>,
    pub(crate) steps: usize,
    pub(crate) depth: usize,
    pub(crate) story: Option<Story<M>>,
    /// Each edge, from one state to another.
    edges: Vec<(u32, u32)>,
    /// The step by which each state was reached first.
    by: Vec<(u32, Option<M::Step>)>,
}

impl<M: Model> Explored<M> {
    /// Searches up to the first state with a violation.
    pub(crate) fn new(model: &M) -> Self {
        let begin = model.begin();
        let mut known: HashMap<M::State, u32, BuildHasherDefault<Fast>> = HashMap::default();
        known.insert(begin, 0);
        let mut it = Self {
            states: vec![begin],
            steps: 0,
            depth: 0,
            story: None,
            edges: Vec::new(),
            by: vec![(0, None)],
        };
        let (mut at, mut end_of_level, mut nexts) = (0, 1, Vec::new());
        while at < it.states.len() {
            if at == end_of_level {
                (it.depth, end_of_level) = (it.depth + 1, it.states.len());
            }
            let from = it.states[at];
            model.steps(&from, &mut nexts);
            for next in nexts.drain(..) {
                it.steps += 1;
                let to = *known.entry(next.state).or_insert_with(|| {
                    it.states.push(next.state);
                    it.by.push((index(at), Some(next.step)));
                    index(it.states.len() - 1)
                });
                it.edges.push((index(at), to));
                if let Some(broken) = next.broken {
                    let mut steps = it.path_to(at);
                    steps.push(next.step);
                    it.story = Some(Story { broken, steps });
                    return it;
                }
            }
            at += 1;
        }
        it
    }

    /// The steps that lead to a state.
    pub(crate) fn path_to(&self, mut at: usize) -> Vec<M::Step> {
        let mut steps = Vec::new();
        while let (before, Some(step)) = self.by[at] {
            steps.push(step);
            at = before as usize;
        }
        steps.reverse();
        steps
    }

    /// A state from which no `good` state can be reached any more.
    ///
    /// Checkers of temporal properties along single paths cannot find this. It is about the states that
    /// stay possible, so it follows all edges backwards.
    pub(crate) fn dead_end(&self, good: impl Fn(&M::State) -> bool) -> Option<usize> {
        let mut begins = vec![0_u32; self.states.len() + 1];
        for (_, to) in &self.edges {
            begins[*to as usize + 1] += 1;
        }
        for at in 1..begins.len() {
            begins[at] += begins[at - 1];
        }
        let (mut before, mut filled) = (vec![0_u32; self.edges.len()], begins.clone());
        for (from, to) in &self.edges {
            before[filled[*to as usize] as usize] = *from;
            filled[*to as usize] += 1;
        }
        let mut reaches: Vec<bool> = self.states.iter().map(good).collect();
        let mut open: Vec<usize> = (0..reaches.len()).filter(|at| reaches[*at]).collect();
        while let Some(at) = open.pop() {
            for from in &before[begins[at] as usize..begins[at + 1] as usize] {
                if !std::mem::replace(&mut reaches[*from as usize], true) {
                    open.push(*from as usize);
                }
            }
        }
        reaches.iter().position(|reaches| !reaches)
    }
}

fn index(at: usize) -> u32 {
    at.try_into().expect("the search is kept small")
}

/// States are small and not chosen to collide, so one multiplication for each word is enough.
#[derive(Default)]
struct Fast(u64);

impl Hasher for Fast {
    fn write(&mut self, bytes: &[u8]) {
        for chunk in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.write_u64(u64::from_le_bytes(word));
        }
    }

    fn write_u8(&mut self, n: u8) {
        self.write_u64(n.into());
    }

    fn write_usize(&mut self, n: usize) {
        self.write_u64(n as u64);
    }

    fn write_u64(&mut self, n: u64) {
        self.0 = (self.0.rotate_left(5) ^ n).wrapping_mul(0x517c_c1b7_2722_0a95);
    }

    // The table takes bits from both ends, but in a product the upper bits are the best.
    fn finish(&self) -> u64 {
        self.0 ^ (self.0 >> 32)
    }
}
