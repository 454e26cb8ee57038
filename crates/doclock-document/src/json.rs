//! JSON as a [`Node`].

use std::fmt;

use serde::{
    Deserialize, Deserializer, Serialize,
    de::{Error, MapAccess, SeqAccess, Visitor},
};

use super::node::{Collected, Leaf, LeafContent, Name, Node};
use crate::BoxError;

pub(crate) fn read(bytes: &[u8]) -> Result<Node, BoxError> {
    Ok(serde_json::from_slice(bytes)?)
}

pub(crate) fn written(node: &Node) -> Vec<u8> {
    let mut text = Vec::new();
    write(node, &mut text);
    text
}

fn write(node: &Node, text: &mut Vec<u8>) {
    match node {
        Node::Document(members) => {
            text.push(b'{');
            for (n, (name, it)) in members.iter().enumerate() {
                text.extend((n > 0).then_some(b','));
                text.extend(leaf(&name.to_string()).into_iter().flat_map(|it| it.bytes));
                text.push(b':');
                write(it, text);
            }
            text.push(b'}');
        }
        Node::Array(elements) => {
            text.push(b'[');
            for (n, it) in elements.iter().enumerate() {
                text.extend((n > 0).then_some(b','));
                write(it, text);
            }
            text.push(b']');
        }
        Node::Leaf(leaf) => text.extend(&leaf.bytes),
    }
}

fn leaf(value: &impl Serialize) -> Result<Leaf, serde_json::Error> {
    let bytes: Box<[u8]> = serde_json::to_vec(value)?.into();
    let number = || serde_json::from_slice::<serde_json::Number>(&bytes).ok();
    let content = match bytes.first() {
        Some(b'"') => LeafContent::Text,
        Some(b'n') => LeafContent::Null,
        Some(b'-' | b'0'..=b'9') => number().map_or(LeafContent::Other, |number| {
            let broken = || number.as_f64().unwrap_or_default().into();
            number.as_i128().map_or_else(broken, LeafContent::Whole)
        }),
        _ => LeafContent::Other,
    };
    Ok(Leaf { kind: 0, bytes, content })
}

impl<'de> Deserialize<'de> for Node {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(Reader)
    }
}

struct Reader;

/// Reads the values that JSON has.
macro_rules! leaves {
    ($($visit:ident($type:ty),)*) => {$(
        fn $visit<E: Error>(self, value: $type) -> Result<Node, E> {
            leaf(&value).map(Node::Leaf).map_err(E::custom)
        }
    )*};
}

impl<'de> Visitor<'de> for Reader {
    type Value = Node;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    leaves! { visit_bool(bool), visit_i64(i64), visit_u64(u64), visit_f64(f64), visit_str(&str), }

    fn visit_unit<E: Error>(self) -> Result<Node, E> {
        leaf(&()).map(Node::Leaf).map_err(E::custom)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut all: A) -> Result<Node, A::Error> {
        let mut elements = Vec::new();
        while let Some(element) = all.next_element()? {
            elements.push(element);
        }
        Ok(Node::Array(elements))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut all: A) -> Result<Node, A::Error> {
        let mut collected = Collected::default();
        while let Some((name, value)) = all.next_entry::<String, _>()? {
            collected.push(Name::from(&*name), value);
        }
        Ok(Node::Document(collected.members))
    }
}
