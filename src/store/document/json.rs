//! JSON as a [`Node`].

use std::fmt;

use serde::{
    Deserialize, Deserializer, Serialize,
    de::{Error, MapAccess, SeqAccess, Visitor},
};

use super::node::{Leaf, Members, Name, Node, Number};
use crate::error::BoxError;

pub(super) fn read(bytes: &[u8]) -> Result<Node, BoxError> {
    Ok(serde_json::from_slice(bytes)?)
}

pub(super) fn written(node: &Node) -> Vec<u8> {
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

pub(super) fn number(text: &[u8]) -> Option<Number> {
    let number: serde_json::Number = serde_json::from_slice(text).ok()?;
    number.as_i128().map(Number::Whole).or_else(|| Some(number.as_f64()?.into()))
}

fn leaf(value: &impl Serialize) -> Result<Leaf, serde_json::Error> {
    Ok(Leaf { kind: 0, bytes: serde_json::to_vec(value)?.into() })
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
        let mut members = Members::new();
        while let Some((name, value)) = all.next_entry::<String, _>()? {
            Node::push(&mut members, Name::from(&*name), value);
        }
        Ok(Node::Document(members))
    }
}
